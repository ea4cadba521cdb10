"""A rank that computes wrongly, or whose state has changed: it is named, and the run ends as if nothing had been."""

import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadfast.config import Config
from steadfast.guards.corruption import Check, choose
from steadfast.plan import Plan, even_shares
from steadfast.run.directory import RunDirectory
from steadfast.tasks import LanguageModeling, Sums
from tests.support.claims import check_identical, check_ledger, check_weights
from tests.support.drill import Drilled, drill
from tests.support.events import event_lines
from tests.support.gang import MemberFailed
from tests.support.reference import reference
from tests.support.small import small

EVERY_STEP = ("run.deterministic=true", 'recompute.every="1 step"')
STEP = 5  # of the flip; of three ranks the owner is the first, which leads
# In fp64: of a gradient's lowest bit, of what the embedding puts out, of a weight of the first layer norm.
FLIPS = {
    "gradient": "where: gradient, bit: 0, element: 2",
    "activation": "where: activation, bit: 40, element: 0",
    "weight": "where: weight, bit: 45, element: 2",
}


def check_of(config: Config, step: int, size: int) -> Check:
    """The check of a step in a world of so many equal workers."""
    batch = config.batch
    shares = even_shares(batch.num_microbatches, size)
    check = choose(Plan(batch.global_size, batch.samples_per_microbatch, shares), 1, config.run.seed, [""] * size, step)
    assert check is not None
    return check


def flip(config: Config, who: str, where: str, size: int) -> tuple[int, str]:
    """A fault that strikes where the owner or the second computes what is compared, and the rank that it is."""
    rank: int = getattr(check_of(config, STEP, size), who)
    during = "step" if who == "owner" else "recompute"
    fault = f"kind: flip_at, step: {STEP}, rank: {rank}, during: {during}, {FLIPS[where]}"
    return rank, f"faults.inject=[{{{fault}}}]"


FP32 = ("precision.kind=fp32", "run.deterministic=true")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Drilled:
    """Three ranks, in fp32, without any check."""
    return drill(small(tmp_path_factory.mktemp("undisturbed"), *FP32), worlds=[3])


def corruptions(config: Config) -> list[dict[str, Any]]:
    return [event for event in event_lines(RunDirectory.of(config)) if event["event"] == "corruption"]


@pytest.mark.parametrize("who", ["owner", "second"])
@pytest.mark.parametrize("where", FLIPS)
def test_it_is_named_and_the_run_ends_with_the_bits_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Drilled, where: str, who: str
) -> None:
    """The second world has the odd one in it again, with what the others have given it."""
    words = (*FP32, 'recompute.every="1 step"')
    check = check_of(small(tmp_path), STEP, 3)
    rank, fault = flip(small(tmp_path), who, where, size=3)
    config = small(tmp_path, *words, fault)
    run = drill(config, worlds=[3, 3])

    (told,) = corruptions(config)
    assert (told["attempt"], told["step"], told["rank"]) == (1, STEP, rank)
    assert rank == {"owner": 0, "second": 2}[who]
    assert told["microbatch"] == check.microbatch.index
    digests = {int(each): own for each, (own,) in told["digests"].items()}
    assert digests.keys() == set(check.ranks)
    wrong = digests.pop(rank)
    assert {wrong} != set(digests.values())
    assert len(set(digests.values())) == 1
    assert f"step {STEP}: rank {rank} (host {told['node']}, {told['device']}) computes wrongly" in told["cause"]

    check_ledger(run, reference(config))
    assert max(line["step"] for line in run.history.lines if line["attempt"] == 1) < STEP
    assert run.told("restore", "step") == [STEP - 1]
    (source,) = run.told("restore", "source")
    assert source in {f"rank {each}" for each in range(3) if each != rank}
    check_identical(run, undisturbed)


def test_in_an_exact_run_the_others_come_to_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    """Whatever the flip, and though the world is another one from then on; checks change no bit either."""
    words = ("precision.kind=bf16", "run.exact=true")
    expected = drill(small(tmp_path / "undisturbed", *words), worlds=[1])
    for number, (where, who) in enumerate((("gradient", "owner"), ("activation", "second"), ("weight", "owner"))):
        folder = tmp_path / str(number)
        rank, fault = flip(small(folder), who, where, size=3)
        config = small(folder, *words, 'recompute.every="1 step"', fault)
        run = drill(config, worlds=[3, [each for each in range(3) if each != rank]])
        assert [(event["step"], event["rank"]) for event in corruptions(config)] == [(STEP, rank)]
        check_identical(run, expected)


def test_where_memory_has_run_out_an_exact_run_says_that_nothing_is_compared(tmp_path: Path) -> None:
    oom = "faults.inject=[{kind: oom_at, step: 3, rank: 0, times: 1}]"
    config = small(tmp_path, "precision.kind=fp32", "run.exact=true", 'recompute.every="1 step"', oom)
    run = drill(config, worlds=[3, 3])
    (notice,) = run.told("notice", "text")
    assert notice.startswith("recompute.every compares no gradients of two workers: memory has run out")


def test_two_ranks_tell_by_the_one_that_comes_to_two_results(tmp_path: Path) -> None:
    expected = drill(small(tmp_path / "undisturbed", *FP32), worlds=[2])
    for who in ("owner", "second"):
        folder = tmp_path / who
        rank, fault = flip(small(folder), who, "gradient", size=2)
        config = small(folder, *FP32, 'recompute.every="1 step"', fault)
        run = drill(config, worlds=[2, 2])
        (told,) = corruptions(config)
        assert (told["step"], told["rank"]) == (STEP, rank)
        assert len(set(told["digests"][str(rank)])) == 2
        assert len(set(told["digests"][str(1 - rank)])) == 1
        assert f"rank {1 - rank} to the same twice" in told["cause"]
        check_identical(run, expected)


def test_of_two_ranks_with_different_weights_nobody_is_blamed_and_the_run_ends(tmp_path: Path) -> None:
    _, fault = flip(small(tmp_path), "owner", "weight", size=2)
    config = small(tmp_path, *EVERY_STEP, fault)
    with pytest.raises(MemberFailed) as failed:
        drill(config, worlds=[2, 2])
    both = r"TrainingError: step 5: rank \d \(host .*\) and rank \d \(host .*\) came to different gradients"
    assert failed.match(both)
    for part in ("each to the same twice", "three workers", "scaling.num_workers", "recompute.every=null"):
        assert part in str(failed.value)
    (told,) = corruptions(config)
    assert told["step"] == STEP
    assert "rank" not in told


def test_results_that_differ_on_all_three_are_no_ranks_fault(tmp_path: Path) -> None:
    config = small(tmp_path, *EVERY_STEP, "task.target=tests.dist.test_recompute:Moody")
    with pytest.raises(MemberFailed, match="not deterministic"):
        drill(config, worlds=[3, 3])


def test_one_rank_has_nobody_to_compare_with_which_is_told_once_in_a_run(tmp_path: Path) -> None:
    config = small(tmp_path, *EVERY_STEP)
    run = drill(config, worlds=[1, 2, 1], leave_after=[4, 4])
    assert run.told("notice", "text") == [
        "recompute.every compares no gradients of two workers: the run has one worker"
    ]
    check_weights(run, reference(config))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="dropout"),
        pytest.param(("precision.kind=bf16",), id="bf16"),
        pytest.param(("model.target=tests.support.models:Normalised",), id="running statistics"),
        pytest.param(("model.target=tests.support.models:Codebook",), id="a buffer that a forward changes"),
        pytest.param(("model.target=tests.support.models:Branched", "task.coupled=true"), id="unused parameters"),
        pytest.param(("memory.activation_checkpointing=full",), id="activation checkpointing"),
        pytest.param(("batch.global_size=3", "run.steps=40"), id="fewer microbatches than ranks"),
        pytest.param(("run.steps=null", "run.epochs=5"), id="a short last step"),
        pytest.param(("data.num_workers=1",), id="loader processes"),
    ],
)
def test_a_check_in_every_step_finds_nothing_and_changes_nothing(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Not a bit, nor a line of the ledger: all is as in a run without."""
    words = (*FP32, *words)
    without = drill(small(tmp_path / "without", *words), worlds=[3, 2], leave_after=[6])
    config = small(tmp_path / "with", *words, 'recompute.every="1 step"')
    checked = drill(config, worlds=[3, 2], leave_after=[6])
    assert corruptions(config) == []
    check_identical(checked, without)
    facts = ("step", "shares", "num_samples", "samples_digest", "loss")
    lines = [[{fact: line[fact] for fact in facts} for line in run.history.lines] for run in (checked, without)]
    assert lines[0] == lines[1]


class Moody:
    """Comes to another loss each time that it is asked, which no seed decides."""

    def __init__(self) -> None:
        self._random = random.Random(os.getpid())
        self._task = LanguageModeling()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        sums = self._task.loss(model, batch)
        return replace(sums, loss_sum=sums.loss_sum * self._random.uniform(0.9, 1.1))


HSDP = "parallel={kind: fsdp, shard_size: 2}"


class Changing:
    """Changes something on one rank after step 4, once a checkpoint is there; `times` times in all."""

    def __init__(self, what: str, rank: int, folder: str, times: int = 1) -> None:
        self._what, self._rank, self._folder, self._times = what, rank, Path(folder), times

    def setup(self, run: Any) -> None:
        if self._what == "buffer":
            run.model.register_buffer("table", torch.zeros(3))

    @torch.no_grad()
    def on_step(self, run: Any) -> None:
        count = len(list(self._folder.glob("changed-*")))
        if (run.step, run.rank) != (4, self._rank) or count == self._times:
            return
        while not list(self._folder.glob("**/manifest.json")):
            time.sleep(0.01)
        (self._folder / f"changed-{count}").touch()
        weight = next(iter(run.model.parameters()))
        match self._what:
            case "weight":
                changed = weight
            case "moment":
                changed = run.optimizer.state[weight]["exp_avg"]
            case "buffer":
                changed = run.model.table
        getattr(changed, "to_local", lambda: changed)().view(-1)[-1] += 0.5

    def state_dict(self) -> dict[str, object]:
        return {"rank": self._rank + time.monotonic()}  # on each rank another one, which is no fault

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def changing(folder: Path, what: str, rank: int, *words: str, times: int = 1) -> Config:
    args = f"{{what: {what}, rank: {rank}, folder: '{folder}', times: {times}}}"
    hook = f"hooks=[{{target: 'tests.dist.test_recompute:Changing', args: {args}}}, {{kind: ema}}]"
    return small(folder, "precision.kind=fp32", "checkpoint.every=3 steps", hook, *words)


@pytest.mark.parametrize(
    ("what", "kind", "size", "rank", "tensor", "ranks"),
    [
        ("weight", "parallel.kind=ddp", 3, 1, "model.embed.weight", [[0, 2], [1]]),
        ("buffer", "parallel.kind=ddp", 2, 0, "model.table", [[0], [1]]),
        ("moment", HSDP, 4, 3, "model.embed.weight", [[1], [3]]),  # which the next update has moved apart,
    ],
)
def test_the_run_goes_back_to_the_checkpoint_before_a_change_on_one_rank(
    tmp_path: Path, what: str, kind: str, size: int, rank: int, tensor: str, ranks: list[list[int]]
) -> None:
    run = drill(changing(tmp_path / "run", what, rank, kind), worlds=[size, size])
    assert run.told("ranks_differ", "tensor") == [tensor]
    assert [list(told.values()) for told in run.told("ranks_differ", "ranks")] == [ranks]
    assert [event["step"] for event in run.events if event["event"] == "checkpoint" and event["attempt"] == 1] == [3]
    assert (run.told("restore", "step"), run.told("restore", "source")) == ([3], ["checkpoint"])
    undisturbed = drill(changing(tmp_path / "undisturbed", what, rank, kind, times=0), worlds=[size])
    assert not undisturbed.told("ranks_differ", "tensor")
    check_identical(run, undisturbed)


def test_a_second_change_ends_the_run(tmp_path: Path) -> None:
    said = "ranks? .* hold different numbers in model.embed.weight, for the second time. Something changes it"
    with pytest.raises(MemberFailed, match=said):
        drill(changing(tmp_path, "weight", 1, times=2), worlds=[2, 2])
