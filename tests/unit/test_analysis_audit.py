"""`audit`: what it proves of a ledger, and each way in which one can be wrong."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from steadfast.analysis.audit import CounterExample, audit
from steadfast.cli import main
from steadfast.config import Config, parse_config
from steadfast.data import build_dataset
from steadfast.data.order import Extent, SampleOrder, build_order
from steadfast.errors import ConfigError
from steadfast.launch.resume import start_or_resume
from steadfast.plan import Amendments, End, Plan
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import Rollback, RunStarted, ShortStep
from steadfast.run.ledger import Ledger, StepStats, StepTimes
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from steadfast.storage.jsonl import Line, read_lines
from tests.support.events import attempt_started
from tests.support.json_tables import check_document
from tests.support.orders import samples_digest
from tests.support.run_directories import write_lines
from tests.support.verbs import printed

NUM_SAMPLES = 61  # of tests.support.small.Tokens; 55 of them are trained on
RUN = """
run: {epochs: 3}
batch: {global_size: 13, microbatch_size: 2}
data: {target: 'tests.support.small:Tokens'}
"""
LAST = 13  # of 9 samples: where the third epoch ends
Break = Callable[[list[Line]], None]


class Written:
    """A run directory whose ledger and events are written as a run writes them."""

    def __init__(
        self,
        folder: Path,
        text: str = RUN,
        sizes: tuple[int, ...] = (),
        extent: Extent | None = None,
    ) -> None:
        self.config: Config = parse_config(text)
        self.directory = RunDirectory(LocalStore(folder))
        Ownership.claim(self.directory.store).release()
        self.directory.write_config(self.config)
        self._sizes = sizes
        self._extent = extent or Extent(NUM_SAMPLES, None, tuple(map(Extent, sizes)))
        self.order = build_order(self.config.data, self._extent, self.config.run.seed)

    @property
    def uri(self) -> str:
        return self.directory.uri

    def extend(self, epochs: int) -> None:
        """Take the run up again with another length, as the command does."""
        self.config = parse_config(RUN, overrides=[f"run.epochs={epochs}"])
        assert start_or_resume(self.config, self.directory, RunStarted(launcher="torchrun"), lambda line: None)

    def attempt(
        self, number: int, first: int, last: int, as_planned: tuple[int, ...] = (), ends: tuple[End, ...] | None = None
    ) -> None:
        """Write the lines of steps `first` to `last`, those `as_planned` without a message of their own.

        Args:
            ends: in place of those that the run's events tell of.
        """
        batch = self.config.batch
        skip = self.directory.amendments().skip
        end = self.config.run.num_samples(self.order.num_train)
        ends = self.directory.amendments().ends if ends is None else ends
        plan = Plan.even(batch.global_size, batch.samples_per_microbatch, 2, num_samples=end)
        plan = plan.amended(Amendments(skip, ends))
        with closing(Ledger(self.directory.store, number, plan, writes=True)) as ledger:
            for step in range(first, last + 1):
                digest = self._digest(*plan.positions(step))
                if step in skip or step in as_planned:
                    ledger.as_planned(step, digest)
                else:
                    stats = StepStats(step, 2.5, 13, 1.0, plan.num_samples_in(step), digest, finite=True)
                    ledger.commit([(stats, StepTimes(0.01, 100.0 + step))])

    def _digest(self, start: int, stop: int) -> int:
        positions = np.arange(start, stop)
        return samples_digest(self.order.train(positions), positions, self.config.run.seed)

    def rewrite(self, breaks: Break) -> None:
        lines = list(read_lines(self.directory.store, STEPS))
        breaks(lines)
        self.directory.store.delete(STEPS)
        write_lines(self.directory, lines)

    def audit(self) -> dict[str, int]:
        found: dict[str, int] = audit(self.directory, self.config, self._extent).to_line()
        return found

    def started(self, attempt: int, step: int) -> None:
        sizes = self._sizes or None
        self.directory.record(attempt_started(attempt, step=step, num_samples=NUM_SAMPLES, source_sizes=sizes))


@pytest.fixture
def run(tmp_path: Path) -> Written:
    """Three attempts: the second does two steps again and one whose message was lost, the third leaves a step out."""
    written = Written(tmp_path)
    written.attempt(1, 1, 6)
    written.started(2, 4)
    written.attempt(2, 5, 9, as_planned=(6,))
    written.directory.record(Rollback(attempt=2, steps=(9,), cause="loss nan"))
    written.started(3, 8)
    written.attempt(3, 9, LAST)
    written.directory.write_summary({"status": "finished", "step": LAST, "metrics": {}})
    return written


PROOF = {
    "steps": 13,
    "samples": 3 * 55 - 13,
    "epochs": 3,
    "epoch_samples": 55,
    "digests": 14,
    "redone": 3,
    "unconfirmed": 1,
    "left_out": 1,
    "left_out_samples": 13,
    "source_samples": (),
}


def test_lines_of_a_leader_that_was_cut_off_may_come_late(run: Written) -> None:
    assert run.audit() == PROOF
    run.rewrite(lambda lines: lines.append(lines.pop(5)))
    assert run.audit() == PROOF


def with_order(order: str) -> str:
    return RUN.replace("data: {", f"data: {{order: {order}, ")


@pytest.mark.parametrize("order", ["sequential", "{target: 'tests.support.orders:Weighted'}"])
def test_a_run_is_proved_in_the_order_that_it_has(tmp_path: Path, order: str) -> None:
    written = Written(tmp_path, with_order(order))
    written.attempt(1, 1, LAST)
    assert written.audit()["epochs"] == 3
    written.config = parse_config(RUN)
    with pytest.raises(CounterExample, match="step 1: expected samples_digest"):
        written.audit()


def test_the_code_of_an_order_that_is_not_there_is_named(tmp_path: Path) -> None:
    written = Written(tmp_path, with_order("sequential"))
    with pytest.raises(Exception, match="has no steps yet"):
        written.audit()
    written.attempt(1, 1, LAST)
    written.config = parse_config(with_order("{target: 'gone_away:order'}"))
    with pytest.raises(ConfigError, match=r"data\.order\.target: .*no module gone_away"):
        written.audit()


def remove(index: int) -> Break:
    return lambda lines: lines.__delitem__(index)


def repeat(index: int, place: int | None = None) -> Break:
    return lambda lines: lines.insert(index if place is None else place, dict(lines[index]))


def change(index: int, **fields: object) -> Break:
    return lambda lines: lines[index].update(fields)


def shift(index: int) -> Break:
    """A digest is that of samples one place further on."""

    def shifted(lines: list[Line]) -> None:
        order = SampleOrder(NUM_SAMPLES, 0.1, 1)
        positions = np.arange(13) + 13 * (lines[index]["step"] - 1)
        lines[index]["samples_digest"] = f"{samples_digest(order.train(positions + 1), positions + 1, 1):016x}"

    return shifted


# Of 16 lines: steps 1 to 6, 5 to 9 and 9 to 13.
BROKEN = {
    "the first step removed": (remove(0), "step 1: expected a line, found none"),
    "one step removed": (remove(2), "step 3: expected a line, found step 4 as the next step of attempt 1"),
    "one step removed that was done again": (remove(4), "step 5: expected a line, found step 6"),
    "the first step of an attempt removed": (remove(6), "step 5: expected a line, found step 6 as the next step of"),
    "the last step removed": (remove(-1), "step 13: expected a line, found none"),
    "one step twice": (repeat(2), "step 3: expected one line of an attempt, found a second line of attempt 1"),
    "one step twice, far from each other": (repeat(2, -1), "step 3: expected one line of an attempt, found a second"),
    "one step twice, after a later attempt's": (repeat(5, 14), "step 6: expected one line of an attempt, found a sec"),
    "one digest changed": (change(7, samples_digest="00000000deadbeef"), "step 6: expected samples_digest "),
    "no digest": (change(7, samples_digest=None), "step 6: expected samples_digest "),
    "one sample range shifted": (shift(3), "step 4: expected samples_digest "),
    "too few samples": (change(3, num_samples=12), "step 4: expected num_samples 13, found 12"),
    "a full last step": (change(-1, num_samples=13), "step 13: expected num_samples 9, found 13"),
    "a range shifted that was left out": (change(11, positions=[105, 118]), "step 9: expected positions [104, 117]"),
    "left out for no reason": (change(12, skipped=True), "step 10: expected the samples of this step, found a skipped"),
    "not left out": (
        change(11, skipped=False),
        "step 9: expected a skipped step since the rollback in attempt 2, found used",
    ),
    "a step behind the end": (change(-1, step=14, attempt=4), "step 14: expected no step after 13, found step 14"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_ledger_is_refuted(run: Written, name: str) -> None:
    breaks, said = BROKEN[name]
    run.rewrite(breaks)
    with pytest.raises(CounterExample) as refuted:
        run.audit()
    assert str(refuted.value).startswith(said)


def test_an_extended_run_uses_each_sample_once_too(run: Written) -> None:
    run.extend(4)
    run.started(4, 11)
    run.attempt(4, 12, 18)  # from a checkpoint before the short step, which is done again as it was
    run.directory.write_summary({"status": "finished", "step": 18, "metrics": {}})
    run.extend(6)
    run.attempt(5, 19, 27, as_planned=(20,))
    assert run.directory.amendments().ends == ((13, 165), (18, 220))
    longer = {"steps": 27, "samples": 6 * 55 - 13, "epochs": 6, "digests": 14 + 7 + 8, "redone": 3 + 2}
    assert run.audit() == PROOF | longer | {"unconfirmed": 2}


@pytest.mark.parametrize(
    ("is_extended", "said"),
    [
        # As they were before runs wrote down where they had ended: step 14 began where it would after a whole step.
        (True, "step 14: expected samples_digest .* samples were lost"),
        (False, "step 13: expected num_samples 13, found 9"),  # nothing tells of the short step
    ],
)
def test_samples_left_out_behind_a_short_step_are_noticed(run: Written, is_extended: bool, said: str) -> None:
    if is_extended:
        run.extend(4)
    else:
        run.config = parse_config(RUN, overrides=["run.epochs=4"])
    run.attempt(4, 14, 17, ends=())
    with pytest.raises(CounterExample, match=said):
        run.audit()


def test_last_lines_that_a_loss_of_power_has_taken_are_named_as_lost(run: Written) -> None:
    run.rewrite(remove(-1))
    with pytest.raises(CounterExample, match=rf"step {LAST}: .* lost its last lines, .*: the run reached step {LAST}"):
        run.audit()


@pytest.mark.parametrize(("step", "position"), [(13, 164), (12, 165), (13, 220)])
def test_a_step_is_cut_short_by_the_end_of_an_epoch_alone(run: Written, step: int, position: int) -> None:
    run.directory.record(ShortStep(step=step, position=position))
    with pytest.raises(CounterExample, match=f"step {step}: expected an end of an epoch in this step, found"):
        run.audit()


def test_an_order_that_is_no_permutation_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all digests are as planned: workers and audit have the same order."""
    honest = SampleOrder.train
    monkeypatch.setattr(SampleOrder, "train", lambda self, places: honest(self, np.where(places == 60, 61, places)))
    run = Written(tmp_path)
    run.attempt(1, 1, LAST)
    with pytest.raises(CounterExample, match=r"step 5: .* epoch 2 does not use each training sample once"):
        run.audit()


@pytest.mark.parametrize("is_extended", [False, True])
def test_a_ledger_in_pieces_is_the_same(run: Written, monkeypatch: pytest.MonkeyPatch, is_extended: bool) -> None:
    if is_extended:
        run.extend(4)
        run.attempt(4, 14, 18)
    before = run.audit()
    monkeypatch.setattr("steadfast.analysis.audit._PIECE", 26)
    monkeypatch.setattr("steadfast.run.ledger._CHUNK", 4)
    monkeypatch.setattr("steadfast.storage.jsonl._BLOCK_BYTES", 500)
    assert run.audit() == before
    run.rewrite(remove(9))
    with pytest.raises(CounterExample, match="step 8"):
        run.audit()


def test_the_command_prints_the_numbers_or_a_counter_example(run: Written, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "audit", run.uri).out.splitlines() == [
        f"proved: {run.uri}",
        "steps     1 to 13, each once; 3 lines redone by a later attempt",
        "samples   152 used, 55 in an epoch",
        "epochs    3 finished, each with every training sample once",
        "digests   14 compared, all as planned; 1 step whose record was lost with a worker",
        "left out  1 step of 13 samples, by rollbacks",
    ]
    check_document("`audit`", json.loads(printed(capsys, "audit", run.uri, "--json").out))
    run.rewrite(remove(2))
    assert "error: step 3: expected a line, found step 4" in printed(capsys, "audit", run.uri, code=1).err
    found = json.loads(printed(capsys, "audit", run.uri, "--json", code=1).out)
    assert (found["proved"], found["counter_example"]["step"]) == (False, 3)
    check_document("`audit`", found, table=1)


def test_the_command_imports_nothing_that_the_run_names_unless_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = with_order("{target: 'tests.support.orders:Weighted'}")
    written = Written(tmp_path, text)
    written.attempt(1, 1, LAST)
    uri = written.uri
    touch = "data: {order: {target: 'os:system', args: {command: 'touch PLACE/touched'}},"
    planted = text.replace("data: {order: {target: 'tests.support.orders:Weighted'},", touch.replace("PLACE", uri))
    written.directory.write_config(parse_config(planted))
    said = printed(capsys, "audit", uri, code=2).err
    assert "error: data.target tests.support.small:Tokens: the run's config.yaml names this code" in said
    assert f"steadfast audit {uri} --trust-code. Or give the length of the dataset: --samples N" in said
    said = printed(capsys, "audit", uri, "--samples", "61", code=2).err
    assert "error: data.order.target os:system: the run's config.yaml names this code" in said
    assert f"steadfast audit {uri} --samples 61 --trust-code" in said
    assert not (tmp_path / "touched").exists()
    written.directory.write_config(parse_config(text))
    assert main(0.0, ["audit", uri, "--trust-code"]) == 0


@pytest.mark.parametrize("in_mixture", [False, True])
def test_audit_reads_no_data_that_the_run_names_without_consent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, in_mixture: bool
) -> None:
    monkeypatch.setattr("steadfast.data.shard_files.runs_root", lambda: tmp_path / "reader")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.jsonl").write_text('{"x": 1}\n' * 61)
    section, key = f"kind: jsonl, path: {tmp_path}/shards", "data.path"
    if in_mixture:
        section, key = f"kind: mixture, sources: [{{{section}}}, {{kind: text}}]", "data.sources.0.path"
    text = RUN.replace("target: 'tests.support.small:Tokens'", section)
    config = parse_config(text).data
    written = Written(tmp_path / "run", text, extent=Extent.of(build_dataset(config, keeps_indices=False)))
    written.attempt(1, 1, 3)
    before = sorted(tmp_path.rglob("*"))
    said = printed(capsys, "audit", written.uri, code=2).err
    assert f"error: {key} {tmp_path}/shards: the run's config.yaml names these data, and the command would read" in said
    assert f"steadfast audit {written.uri} --trust-code" in said
    assert main(0.0, ["audit", written.uri, "--trust-code"]) == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_without_the_dataset_its_length_will_do(run: Written, capsys: pytest.CaptureFixture[str]) -> None:
    run.directory.store.delete("events.jsonl")
    run.directory.record(Rollback(attempt=2, steps=(9,), cause="loss nan"))
    run.directory.write_config(
        parse_config(RUN.replace("target: 'tests.support.small:Tokens'", "path: gone, kind: tokens"))
    )
    assert "Or give the length" in printed(capsys, "audit", run.uri, code=2).err
    assert main(0.0, ["audit", run.uri, "--trust-code"]) == 2
    assert "If the data are not available here, give the length of the dataset: --samples N" in capsys.readouterr().err
    assert json.loads(printed(capsys, "audit", run.uri, "--samples", "61", "--json").out)["steps"] == 13


MIXTURE = """
run: {epochs: 3}
batch: {global_size: 13, microbatch_size: 2}
data: {kind: mixture, sources: [{kind: text, weight: 2}, {kind: text, source: other.txt}]}
"""


def mixed(folder: Path, text: str = MIXTURE) -> Written:
    """Write a run over two sources, of 40 and 21 samples."""
    written = Written(folder, text, sizes=(40, 21))
    written.attempt(1, 1, LAST)
    written.started(1, 0)
    return written


def test_a_mixture_is_proved_with_the_share_of_each_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = mixed(tmp_path)
    assert written.audit()["source_samples"] == (110, 55)
    assert main(0.0, ["audit", written.uri]) == 0
    shares = "0 text: 110 samples (66.67%, weight 2 of 3); 1 text: 55 samples (33.33%, weight 1 of 3)"
    assert f"sources   {shares}" in capsys.readouterr().out
    assert main(0.0, ["audit", written.uri, "--samples", "61"]) == 2


def test_source_ordered_by_a_function_may_repeat_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = "order: {target: 'tests.support.orders:Weighted'}"
    written = mixed(tmp_path, MIXTURE.replace("other.txt", f"other.txt, {order}"))
    assert written.audit()["source_samples"] == (110, 55)
    assert main(0.0, ["audit", written.uri, "--trust-code"]) == 0
    assert "of its own, except sources that a function orders" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("planted", "key"),
    [("{kind: text, source: other.txt, order: {CODE}}", "1.order.target"), ("{CODE, order: blocks}", "1.target")],
)
def test_code_of_a_source_needs_trust(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], planted: str, key: str
) -> None:
    written = mixed(tmp_path)
    code = f"target: 'os:system', args: {{command: 'touch {tmp_path}/touched'}}"
    text = MIXTURE.replace("{kind: text, source: other.txt}", planted.replace("CODE", code))
    written.directory.write_config(parse_config(text))
    said = printed(capsys, "audit", written.uri, code=2).err
    assert f"data.sources.{key} os:system: the run's config.yaml names this code" in said
    assert "--samples" not in said
    assert not (tmp_path / "touched").exists()


class Blocks(list[int]):
    blocks = np.arange(0, 21, 7)


def in_blocks() -> Blocks:
    return Blocks(range(21))


def test_a_source_of_blocks_of_the_users_own_is_proved(tmp_path: Path) -> None:
    own = "{target: 'tests.unit.test_analysis_audit:in_blocks', order: blocks}"
    text = MIXTURE.replace("{kind: text, source: other.txt}", own).replace("{kind: text, weight", f"{own[:-1]}, weight")
    written = Written(tmp_path, text, extent=Extent.of(build_dataset(parse_config(text).data)))
    written.attempt(1, 1, 8)
    assert main(0.0, ["audit", written.uri, "--trust-code"]) == 0


def test_a_source_that_repeats_a_sample_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = mixed(tmp_path / "honest").order.parts[1]  # type: ignore[attr-defined]
    stock = SampleOrder.train

    def train(self: SampleOrder, positions: np.ndarray) -> np.ndarray:
        # Place 5 of the second source reads the sample of place 4 again.
        return stock(self, np.where(positions == 5, 4, positions) if self.num_train == part.num_train else positions)

    monkeypatch.setattr(SampleOrder, "train", train)
    with pytest.raises(CounterExample, match="epoch 1 of source 1 does not use each training sample once"):
        mixed(tmp_path / "repeated").audit()
