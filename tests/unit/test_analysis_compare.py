"""`compare`: each way in which two ledgers can part, and what is no difference."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steadfast.analysis.compare import Comparison, Difference, HeldLines, Ran, compare, relative_difference
from steadfast.analysis.report.course import Course
from steadfast.analysis.report.figures import losses_of
from steadfast.config import parse_config
from steadfast.errors import UsageError
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import AttemptEnded, RunStarted, Validation
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from steadfast.storage.jsonl import Line
from tests.support.events import attempt_started
from tests.support.json_tables import check_document
from tests.support.run_directories import write_lines
from tests.support.verbs import printed

RUN = """
batch: {global_size: 12, microbatch_size: 2}
data: {target: 'tests.support.small:Tokens'}
"""

NAN, INF = float("nan"), float("inf")


def line(step: int, attempt: int = 1, shares: tuple[int, ...] = (3, 3), **fields: Any) -> Line:
    """A step's line as a run writes it, with a digest of the weights after every third step."""
    found = {
        "step": step,
        "attempt": attempt,
        "world_size": len(shares),
        "shares": list(shares),
        "num_samples": 12,
        "samples_digest": f"{step:016x}",
        "loss": 3.0 + 1 / step,
        "step_s": 0.01,
        "time_s": 100.0 + step,
    }
    return found | ({"weights": f"{step:032x}"} if step % 3 == 0 else {}) | fields


class Pair:
    """Two runs whose ledgers are made by hand."""

    def __init__(self, folder: Path) -> None:
        self.directories = [RunDirectory(LocalStore(folder / name)) for name in ("a", "b")]
        self.lines = [[line(step) for step in range(1, 11)] for _ in self.directories]
        for directory in self.directories:
            Ownership.claim(directory.store).release()
            directory.write_config(parse_config(RUN))

    @property
    def theirs(self) -> list[Line]:
        return self.lines[1]

    def write(self) -> None:
        for directory, lines in zip(self.directories, self.lines, strict=True):
            directory.store.delete(STEPS)
            write_lines(directory, lines)

    def compare(self) -> Comparison:
        self.write()
        return compare(*self.directories)

    def first(self) -> Difference:
        """Return the first difference, where there must be one."""
        found = self.compare().first
        assert found is not None
        return found

    def configure(self, *overrides: str) -> None:
        """Give the second run another configuration."""
        self.directories[1].write_config(parse_config(RUN, overrides=overrides))

    def ended(self, *digests: str, step: int = 10) -> None:
        for directory, digest in zip(self.directories, digests, strict=True):
            directory.write_summary({"status": "finished", "step": step, "metrics": {}, "model_sha256": digest})

    @property
    def uris(self) -> list[str]:
        return [directory.uri for directory in self.directories]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


SAME = Comparison((10, 10), steps=10, losses=10, weights=3, weights_same=9)


def change(step: int, **fields: Any) -> Callable[[list[Line]], None]:
    return lambda lines: lines[step - 1].update(fields)


def remove(step: int) -> Callable[[list[Line]], None]:
    return lambda lines: lines.__delitem__(step - 1)


# What is done to the second run, the step that is named, what differs there, and between which digests of the weights.
PARTED = {
    "a step is gone": (remove(4), 4, {"line": (True, False)}, (9, None)),
    "other samples": (change(4, samples_digest="00"), 4, {"samples_digest": (f"{4:016x}", "00")}, (9, None)),
    "fewer samples": (change(4, num_samples=11), 4, {"num_samples": (12, 11)}, (9, None)),
    "left out": (change(4, skipped=True, num_samples=0, loss=None), 4, {"skipped": (False, True)}, (9, None)),
    "an overflow": (change(4, overflow=True), 4, {"overflow": (False, True)}, (9, None)),
    "another loss": (change(4, loss=3.5), 4, {"loss": (3.25, 3.5)}, (9, None)),
    "no loss at all": (change(4, loss=NAN), 4, {"loss": (3.25, pytest.approx(NAN, nan_ok=True))}, (9, None)),
    "a loss in its last bit": (change(4, loss=3.25 + 2**-51), 4, {"loss": (3.25, 3.25 + 2**-51)}, (9, None)),
    "other weights": (change(6, weights="f" * 32), 6, {"weights": (f"{6:032x}", "f" * 32)}, (3, 6)),
    "the first weights": (change(3, weights="f" * 32), 3, {"weights": (f"{3:032x}", "f" * 32)}, (None, 3)),
}


@pytest.mark.parametrize("name", PARTED)
def test_the_first_difference_is_named(pair: Pair, name: str) -> None:
    breaks, step, values, weights = PARTED[name]
    breaks(pair.theirs)
    pair.theirs[-1]["loss"] = 99.0  # is not the first
    first, found = pair.first(), pair.compare()
    assert (first.step, first.values) == (step, values)
    assert (found.weights_same, found.weights_differ) == weights


def test_all_that_differs_in_the_first_step_is_named(pair: Pair) -> None:
    pair.theirs[5].update(num_samples=11, samples_digest="b", loss=4.0, weights="c", overflow=True)
    assert list(pair.first().values) == ["num_samples", "samples_digest", "overflow", "loss", "weights"]


def test_who_ran_the_step_is_named_with_its_nodes(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.theirs[4:] = [line(step, 3, (2, 2, 2)) for step in range(5, 11)]
    pair.theirs[6]["loss"] = 4.0
    red, blue = "a" * 56, "b" * 56
    for attempt, nodes in ((1, {red: (0, 1)}), (3, {red: (0,), blue: (1, 2)})):
        pair.directories[1].record(attempt_started(attempt, step=4, nodes=nodes))
    ours, theirs = pair.first().ran
    assert ours == Ran(attempt=1, world_size=2, shares=[3, 3], nodes=None)
    assert theirs == Ran(attempt=3, world_size=3, shares=[2, 2, 2], nodes={red: [0], blue: [1, 2]})
    shown = printed(capsys, "compare", *pair.uris, code=1).out
    with_nodes = "with 2, 2, 2 microbatches on node aaaaaaaa (rank 0), node bbbbbbbb (ranks 1-2)"
    assert f"B: attempt 3: 3 workers {with_nodes}\n" in shown


def test_steps_that_were_done_again_count_as_they_were_the_last_time(pair: Pair) -> None:
    wrong = [line(step, loss=9.0, weights="0", samples_digest="0", skipped=True) for step in range(6, 9)]
    again = [line(step, 2) for step in range(6, 11)]
    pair.lines[1] = [*pair.theirs[:5], *wrong, *again]
    assert pair.compare().first is None
    # A leader that was cut off writes its last lines after its successor's first ones.
    pair.lines[1] = [*pair.theirs[:4], *again[:3], pair.theirs[4], *wrong, *again[3:]]
    assert pair.compare() == SAME
    again[1]["loss"] = 4.0
    assert (pair.first().step, list(pair.first().values)) == (7, ["loss"])


def test_equal_runs_are_the_same_and_a_longer_one_is_compared_as_far_as_the_other_has_come(pair: Pair) -> None:
    assert pair.compare() == SAME
    pair.lines[1] = [line(step) for step in range(1, 15)]
    pair.theirs[11]["loss"] = 9.0
    assert pair.compare() == replace(SAME, last_steps=(10, 14))


def test_a_step_whose_message_was_lost_has_no_loss_to_compare(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.theirs[5] = line(6, confirmed=False, loss=None)
    del pair.theirs[5]["weights"]
    pair.lines[0][5]["overflow"] = True
    assert pair.compare() == Comparison((10, 10), steps=10, unconfirmed=1, losses=9, weights=2, weights_same=9)
    for each in pair.theirs:
        each.pop("weights", None)
    pair.write()
    said = printed(capsys, "compare", *pair.uris).out
    assert "losses    9 compared; 1 step unconfirmed" in said
    assert "weights   not compared: no step has a digest of the weights in both runs" in said
    pair.theirs[5]["samples_digest"] = "0"
    assert pair.compare().first is not None


def test_losses_that_other_workers_have_summed_differ_by_rounding(pair: Pair) -> None:
    pair.theirs[3:] = [line(step, 2, (2, 2, 2)) for step in range(4, 11)]
    pair.theirs[4]["loss"] *= 1 + 1e-10
    pair.theirs[6]["loss"] *= 1 + 2e-15
    found = pair.compare()
    assert found.first is None
    assert (found.rounded, found.rounded_since, found.shared_otherwise) == (2, 5, 4)
    assert found.largest_rounding == pytest.approx(1e-10, rel=1e-3)
    pair.theirs[7]["loss"] *= 1 + 2e-9
    assert pair.first().step == 8


def test_losses_have_the_same_bits_unless_other_workers_or_shares_have_summed_them(pair: Pair) -> None:
    pair.theirs[4:] = [line(step, 2, (2, 2, 2)) for step in range(5, 11)]
    pair.theirs[3]["loss"] *= 1 + 1e-15  # before any other workers had a hand in it
    assert pair.first().step == 4
    pair.theirs[3] = line(4, 1, (4, 2), loss=3.25 * (1 + 1e-15))
    found = pair.compare()
    assert found.first is None
    assert found.shared_otherwise == 4


def test_the_states_that_runs_end_with_are_compared_too(pair: Pair) -> None:
    pair.ended("a", "a")
    assert pair.compare().ends == {"model_sha256": ("a", "a")}
    pair.ended("a", "b")
    assert (pair.first().step, pair.first().values) == (10, {"model_sha256": ("a", "b")})
    pair.directories[1].write_summary({"status": "stopped", "step": 9, "metrics": {}, "model_sha256": "b"})
    assert pair.compare().ends == {}


def test_configurations_that_make_other_runs_are_told(pair: Pair) -> None:
    pair.configure("run.seed=2", "run.exact=true", "optimizer.lr=1e-2", "run.name=other", "logging.every_steps=3")
    changes = {change.key: (change.old, change.new, change.identity) for change in pair.compare().changes}
    assert changes == {"run.seed": (1, 2, True), "run.exact": (False, True, False), "optimizer.lr": (1e-3, 1e-2, False)}
    Path(pair.directories[0] / "config.yaml").unlink()
    assert pair.compare().changes == [], "nothing to compare with"


def test_a_size_of_microbatches_that_was_chosen_is_the_one_compared(pair: Pair) -> None:
    pair.configure("batch.microbatch_size=auto")
    pair.directories[1].write_microbatch_size(2)
    assert pair.compare().changes == []
    pair.directories[1].write_microbatch_size(4)
    assert [change.key for change in pair.compare().changes] == ["batch.microbatch_size"]


def test_a_ledger_in_pieces_is_the_same(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.lines = [[line(step) for step in range(1, 3000)] for _ in pair.lines]
    pair.lines[1][2000]["weights"] = "0"
    expected = pair.compare()
    assert expected.weights_differ == 2001
    monkeypatch.setattr("steadfast.run.ledger._CHUNK", 7)
    monkeypatch.setattr("steadfast.storage.jsonl._BLOCK_BYTES", 5000)
    assert pair.compare() == expected


def test_what_is_no_line_of_ours_is_passed_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    good = [json.dumps(line(step)) for step in (1, 2)]
    odd = ['{"step": 2.5, "attempt": 1}', '{"step": 0, "attempt": 1}', '{"step": 2}', "[]", '{"step": true, "attempt"']
    store.commit(STEPS, "\n".join([good[0], *odd, good[1], '{"step": 3, "attempt": 1, "lo']).encode())
    held = HeldLines(store)
    assert held.last == 2
    assert [each["step"] for each in held] == [1, 2]
    store.commit(STEPS, "\n".join(odd).encode())
    held = HeldLines(store)
    assert (held.last, list(held)) == (0, [])


@pytest.mark.parametrize(
    ("one", "other", "relative"),
    [(1, 1, 0), (2, 1, 0.5), (-1, 1, 2), (INF, INF, 0), (0, 0, 0), (NAN, NAN, 0), (NAN, 1, INF), (INF, 1, INF)],
)
def test_relative_differences(one: float, other: float, relative: float) -> None:
    assert relative_difference(one, other) == relative_difference(other, one) == relative


def test_without_a_step_in_common_there_is_nothing_to_compare(pair: Pair) -> None:
    pair.lines[1] = []
    with pytest.raises(UsageError, match=r"a has reached step 10, .*b step 0"):
        pair.compare()
    pair.lines = [[line(1), line(4)], [line(2), line(3)]]
    with pytest.raises(UsageError, match="no step is in both ledgers"):
        pair.compare()


def test_the_command_says_that_runs_are_the_same(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.theirs[3:] = [line(step, 2, (2, 2, 2), loss=(3 + 1 / step) * (1 + 1e-12)) for step in range(4, 11)]
    pair.ended("a", "a")
    pair.write()
    verdict, _, _ = printed(capsys, "compare", *pair.uris).out.partition("\n\n")
    assert verdict.splitlines() == [
        f"A: {pair.uris[0]}",
        f"B: {pair.uris[1]}",
        "no difference found in the compared values",
        "steps     10 compared, with their samples; A has reached step 10, B step 10",
        "losses    10 compared",
        "rounding  loss differs by rounding in 7 steps (relative, at most 1.0e-12), first at step 4",
        "workers   different workers or shares, first at step 4",
        "weights   3 digests compared, all the same, the last after step 9",
        "ends      the same model_sha256",
    ]


def test_the_command_says_that_one_run_ended_before_the_other(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.theirs.pop()
    pair.write()
    told = printed(capsys, "compare", *pair.uris, code=1).out.splitlines()[2]
    assert told == "different last steps, A 10 and B 9; up to there no difference was found"


def test_the_command_names_the_difference(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.configure("run.seed=2", "optimizer.lr=1e-2")
    for each in pair.theirs[5:]:
        each.update({"weights": "f" * 32} if "weights" in each else {"loss": each["loss"] * 1.5})
    pair.write()
    verdict, _, table = printed(capsys, "compare", *pair.uris, code=1).out.partition("\n\n")
    assert verdict.splitlines() == [
        f"A: {pair.uris[0]}",
        f"B: {pair.uris[1]}",
        "their configurations make them different runs: run.seed",
        f"they differ, first at step 6: different weights after this step, with digests {6:032x} and {'f' * 32}",
        "  A: attempt 1: 2 workers with 3, 3 microbatches",
        "  B: attempt 1: 2 workers with 3, 3 microbatches",
        "steps     10 compared, with their samples; A has reached step 10, B step 10",
        "losses    10 compared",
        "weights   3 digests compared: the same up to step 3, different since step 6",
    ]
    assert [row.split() for row in table.splitlines()[:3]] == [
        ["A:", "a", "B:", "b"],
        ["run.seed", "1", "2"],
        ["optimizer.lr", "0.001", "0.01"],
    ]
    found = json.loads(printed(capsys, "compare", *pair.uris, "--json", code=1).out)
    assert (found["runs"], found["same"], found["weights_same"], found["weights_differ"]) == (pair.uris, False, 3, 6)
    assert found["first"]["step"] == 6
    assert found["first"]["ran"][1]["shares"] == [3, 3]
    assert found["changes"][0] == {"key": "run.seed", "a": 1, "b": 2, "identity": True}
    check_document("`compare`", found)


@pytest.fixture
def three(pair: Pair) -> list[RunDirectory]:
    """Three runs: the second has other keys and a validation, and the third a resize but no configuration."""
    third = RunDirectory(LocalStore(Path(pair.uris[0]).parent / "c"))
    Ownership.claim(third.store).release()
    pair.configure("run.seed=2", "optimizer.lr=1e-2", "run.name=b")
    pair.lines = [[line(step) for step in range(1, 11)] for _ in range(3)]
    pair.directories.append(third)
    pair.write()
    for directory in pair.directories:
        directory.record(RunStarted(time_s=90.0, launcher="ray"))
    pair.directories[1].record(Validation(time_s=111.0, step=10, metrics={"loss": 1.5, "top1": 0.5}))
    third.record(attempt_started(time_s=101.0))
    third.record(AttemptEnded(time_s=104.0, attempt=1, cause="resized", step=4))
    third.record(attempt_started(2, time_s=105.0, step=4, world_size=3))
    return pair.directories


def test_three_runs_are_a_table_of_keys_results_and_costs(
    three: list[RunDirectory], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    uris = [directory.uri for directory in three]
    found = json.loads(printed(capsys, "compare", *uris, "--json").out)
    assert found["runs"] == uris
    assert found["keys"] == [
        {"key": "run.seed", "values": [1, 2, "unknown"]},
        {"key": "optimizer.lr", "values": [0.001, 0.01, "unknown"]},
    ]
    assert "same" not in found
    assert found["outcomes"][1]["metrics"] == {"loss": 1.5, "top1": 0.5}
    assert [each["wall_s"] for each in found["outcomes"]] == [20.0, 21.0, 20.0]
    assert [each["worker_s"] for each in found["outcomes"]] == [40.0, 42.0, 40.0]
    assert [each["interruptions"] for each in found["outcomes"]] == [{}, {}, {"resize": 1}]
    rows = {}
    for row in printed(capsys, "compare", *uris).out.splitlines():
        heading, *cells = re.split("  +", row.strip())
        rows[heading] = cells
    assert rows["a"] == ["b", "c"]  # the headings
    assert rows["optimizer.lr"] == ["0.001", "0.01", "unknown"]
    assert rows["validation top1"] == ["0.5000"]
    assert rows["worker-seconds"] == ["40", "42", "40"]
    assert rows["interruptions"] == ["0", "0", "1 resize"]


def test_page_of_a_comparison_has_the_losses_of_all_runs(
    three: list[RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uris = [directory.uri for directory in three]
    place = tmp_path / "page.html"
    printed(capsys, "compare", *uris, "--html", str(place))
    page = place.read_text()
    assert "<h1>a, b, c</h1>" in page
    assert "optimizer.lr</td>" in page
    drawing = losses_of({directory.name: Course.read(directory) for directory in three})
    assert [*drawing.legend] == ["a", "b", "c"]
    assert len({*drawing.legend.values()}) == 3
    said = printed(capsys, "compare", *uris, "--html", "/nowhere/page.html", code=2).err
    assert "--html /nowhere/page.html cannot be written: No such file or directory" in said
