"""`batch.balance`: shares by speed and by label, and parts of microbatches, with the result of one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadfast.balance.shares
from steadfast.config import Config
from steadfast.data.batches import Batch
from steadfast.tasks import LanguageModeling, Sums
from steadfast.world.runtime import World
from tests.dist.test_global_loss import Clip, clip
from tests.support import mutations
from tests.support.claims import check_equal, check_ledger, check_run, check_weights
from tests.support.deaths import Plot, survive
from tests.support.drill import Drilled, Members, drill
from tests.support.gang import MemberFailed
from tests.support.like_nccl import Death
from tests.support.models import Embedded
from tests.support.reference import reference
from tests.support.run_directories import shrink_forwards
from tests.support.small import small

# Sleep is most of a microbatch, so that a busy machine, which adds to both, leaves the one slower by far.
UNEQUAL = "faults.inject=[{kind: slow_at, ranks: [0], ms: 20}, {kind: slow_at, ranks: [1], ms: 66}]"
FAST = "faults.inject=[{kind: slow_at, ranks: [1], ms: 25}]"
NUM_STEPS = 28


def unequal(storage: Path, *overrides: str) -> Config:
    """Sixteen microbatches, the last one short; a microbatch of rank 1 takes about three times as long."""
    batch = ["batch.global_size=31", "batch.microbatch_size=2", "batch.balance=speed", f"run.steps={NUM_STEPS}"]
    return small(storage, *batch, UNEQUAL, *overrides)


def told(run: Drilled) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == "shares"]


def check_fast(event: dict[str, Any], shares: tuple[int, ...]) -> None:
    """The shares of two workers end a step soonest by the times that were measured, of which one is by far longer.

    A busy machine makes both times longer, and so the shares more equal.
    """
    fast_ms, slow_ms = event["microbatch_ms"]
    assert slow_ms > 1.3 * fast_ms
    total = sum(shares)
    soonest = min(range(1, total), key=lambda share: max(share * fast_ms, (total - share) * slow_ms))
    assert tuple(event["after"]) == shares == (soonest, total - soonest)


@pytest.mark.parametrize(
    "loader",
    [pytest.param(("data.num_workers=0",), marks=pytest.mark.slow), ("data.num_workers=2",)],
)
def test_a_slow_worker_is_given_less_and_the_result_is_the_same(tmp_path: Path, loader: tuple[str, ...]) -> None:
    config = unequal(tmp_path, *loader)
    run = drill(config, worlds=[2])
    check_run(run, reference(config))
    shares, event = run.history.shares, told(run)[0]
    assert shares[event["step"] - 2] == (8, 8)
    check_fast(event, shares[event["step"] - 1])


def test_a_worker_that_recovers_is_given_its_part_again(tmp_path: Path) -> None:
    slow = "{kind: slow_at, ranks: [0, 2], ms: 20}, {kind: slow_at, ranks: [1], ms: 66, until: 30}, "
    slow += "{kind: slow_at, ranks: [1], ms: 20, step: 30}"
    config = unequal(tmp_path, f"faults.inject=[{slow}]", "run.steps=70")
    run = drill(config, worlds=[3])
    check_run(run, reference(config))
    shares = run.history.shares
    assert shares[28][1] < 4 <= shares[-1][1]


def test_shares_begin_anew_with_each_world_and_checkpoints_do_not_disturb_them(tmp_path: Path) -> None:
    config = unequal(tmp_path, "checkpoint.every=1 steps", "run.steps=46")
    run = drill(config, worlds=[2, 3], leave_after=[20])
    check_run(run, reference(config))
    shares = run.history.shares
    assert shares[0] == (8, 8)
    check_fast([event for event in told(run) if event["step"] <= 20][-1], shares[19])
    assert shares[22] == (6, 5, 5)
    assert shares[-1][1] < 4


def test_sharded_workers_stay_even_and_say_so(tmp_path: Path) -> None:
    config = unequal(tmp_path, FAST, "parallel.kind=fsdp", "run.steps=14")
    run = drill(config, worlds=[2])
    check_run(run, reference(config))
    assert set(run.history.shares) == {(8, 8)}
    assert [(event["after"], event["parallel"]) for event in told(run)] == [([8, 8], "fsdp")]


def label_by_rank() -> None:
    """What the machine's environment would say: the first worker is a fast one, all others are slow."""
    honest = steadfast.balance.shares._labels

    def labels(world: World, device: torch.device) -> list[tuple[str, ...]]:
        os.environ["STEADFAST_LABEL"] = "zone-b,slow" if world.rank else "fast"
        return honest(world, device)

    steadfast.balance.shares._labels = labels


def test_weights_by_label_hold_from_the_first_step(tmp_path: Path) -> None:
    config = unequal(tmp_path, FAST, "batch.balance={fast: 2, slow: 1}", "run.steps=14")
    run = drill(config, worlds=[3], patch=label_by_rank)
    check_run(run, reference(config))
    assert set(run.history.shares) == {(8, 4, 4)}
    assert told(run)[0]["weights"] == [2, 1, 1]


def test_a_worker_without_a_weight_is_one_clear_error(tmp_path: Path) -> None:
    config = unequal(tmp_path, "batch.balance={A100: 2, T4: 1}")
    with pytest.raises(MemberFailed, match="worker 0 is labelled cpu, and the weights are for A100, T4"):
        drill(config, worlds=[2])


def test_even_shares_take_no_times_and_send_none(tmp_path: Path) -> None:
    config = unequal(tmp_path, FAST, "batch.balance=even", "run.steps=14")
    run = drill(config, worlds=[2], patch=mutations.refuse_to_take_times)
    assert set(run.history.shares) == {(8, 8)}
    assert told(run) == []


def test_shares_that_change_too_early_are_noticed(tmp_path: Path) -> None:
    """A loader that has read ahead must not be overtaken: the plan refuses."""
    config = unequal(tmp_path, FAST, "data.num_workers=2")
    with pytest.raises(MemberFailed, match="has been read"):
        drill(config, worlds=[2], patch=mutations.forget_what_loaders_have_read)


HERE = "tests.dist.test_balance"
EVEN_SAMPLES = "batch.balance=even_samples"


def even_samples(storage: Path, *overrides: str) -> Config:
    """Twenty steps of eight microbatches, of which the last one is short."""
    batch = ["batch.global_size=61", "batch.microbatch_size=8", EVEN_SAMPLES, "model.dropout=0"]
    return small(storage, *batch, "run.steps=20", *overrides)


def test_run_with_parts_equals_one_process_when_a_worker_leaves(tmp_path: Path) -> None:
    config = even_samples(tmp_path)
    run = drill(config, worlds=[4, 3], leave_after=[9])
    check_run(run, reference(config))
    assert run.history.shares == [(2, 2, 2, 2)] * 10 + [(3, 3, 3)] * 10


@pytest.mark.slow
def test_run_with_parts_equals_one_process_when_a_worker_dies(tmp_path: Path) -> None:
    """In a world without parts, then in one with them."""
    config = even_samples(tmp_path)
    deaths = {1: (2, Death(16, "while it runs")), 2: (3, Death(16, "when it is done"))}
    left = survive(config, Plot(worlds=[[0, 1, 2, 3], [0, 1, 3], [0, 1, 4, 5, 6]], deaths=deaths)).left
    expected = reference(config)
    check_ledger(left, expected)
    check_weights(left, expected)
    assert list(dict.fromkeys(left.history.shares)) == [(2, 2, 2, 2), (3, 3, 3), (2, 2, 2, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "worlds"),
    [
        (["parallel.reducer=torch"], [3, 5]),
        (["parallel.kind=fsdp"], [3, 5]),
        (["parallel={kind: fsdp, shard_size: 2}"], [6, 2]),
        (["parallel={kind: fsdp, shard_size: 1, tensor_size: 2}"], [6, 2]),
        (["parallel={kind: fsdp, reshard_after_forward: false, reduce_every_microbatch: true}"], [3, 5]),
        (["data.num_workers=2"], [3, 5]),
        (["batch.global_size=17"], [3, 2]),  # a step of three microbatches, the last of one sample
        (["run.epochs=3", "batch.global_size=40"], [3, 4]),
        (["memory.activation_checkpointing=full", "parallel.kind=fsdp"], [3, 5]),
        (["recompute.every=1 step", "run.deterministic=true"], [3, 5]),
    ],
)
def test_every_strategy_with_parts_equals_one_process(tmp_path: Path, words: list[str], worlds: list[Members]) -> None:
    config = even_samples(tmp_path, *words)
    check_run(drill(config, worlds, leave_after=[3]), reference(config))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("forward_size", [1, 3])
def test_parts_are_split_again_when_memory_has_run_out(tmp_path: Path, kind: str, forward_size: int) -> None:
    config = even_samples(tmp_path, f"parallel.kind={kind}", "run.steps=8")
    shrink_forwards(config, forward_size)
    check_run(drill(config, worlds=[3, 2], leave_after=[3]), reference(config))


class DrawingClip(Clip):
    """Draws in the loss of the global batch, whose samples no world cuts."""

    def loss(self, embeddings: dict[str, Any]) -> Sums:
        sums = super().loss(embeddings)
        return Sums(sums.loss_sum * (1 + torch.rand(())), sums.count)


@pytest.mark.parametrize(
    ("global_size", "kind"),
    [(13, "fsdp"), *(pytest.param(*row, marks=pytest.mark.slow) for row in [(5, "fsdp"), (13, "ddp"), (5, "ddp")])],
)
def test_loss_of_the_global_batch_is_that_of_whole_microbatches(tmp_path: Path, kind: str, global_size: int) -> None:
    """With five samples in microbatches of 4, three workers have no whole microbatch."""
    model = "model={target: 'tests.dist.test_global_loss:TwoTowers', args: {dropout: 0}}"
    task = f"task={{target: '{HERE}:DrawingClip'}}"
    words = ["batch.microbatch_size=4", f"batch.global_size={global_size}", model, task]
    whole = drill(clip(tmp_path / "whole", *words), worlds=[1])
    cut = drill(clip(tmp_path / "cut", *words, EVEN_SAMPLES, f"parallel.kind={kind}"), worlds=[3])
    found, expected = ([line["loss"] for line in run.history.lines] for run in (cut, whole))
    assert found == pytest.approx(expected, abs=1e-10)
    check_equal(cut.weights, whole.weights)


class Drawing(LanguageModeling):
    """Draws in a loss, from a step on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first, self._num_calls = first, 0

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        sums = super().loss(model, batch)
        self._num_calls += model.training
        if self._num_calls < self._first:
            return sums
        return Sums(sums.loss_sum * (1 + torch.rand(())), sums.count)


class OwnNorm(Embedded):
    """Subtracts the mean of the microbatch in training, without a layer that torch knows."""

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden - hidden.mean(0) if self.training else hidden


def drawing(first: int) -> list[str]:
    return [f"task={{target: '{HERE}:Drawing', args: {{first: {first}}}}}", "model.dropout=0"]


DRAWS = "even_samples: the model or task draws numbers from the generator of torch in a forward"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (drawing(first=0), DRAWS),
        pytest.param(drawing(first=30), DRAWS, marks=pytest.mark.slow),
        (
            ["model.target=tests.support.models:Normalised"],
            r"its layer norm \(BatchNorm1d\) has statistics of a microbatch",
        ),
        (
            [f"model.target={HERE}:OwnNorm"],
            "as the sum of its halves. The model was in training mode. batch.balance=even_samples cuts",
        ),
    ],
)
def test_what_needs_whole_microbatches_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    """In a world without parts too: a run must not end because it has lost a worker."""
    batch = ["batch.global_size=16", "batch.microbatch_size=4", EVEN_SAMPLES]
    with pytest.raises(MemberFailed, match=message):
        drill(small(tmp_path, *batch, *words), worlds=[1])
