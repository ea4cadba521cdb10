"""`batch.balance=even_samples`: microbatches left over are cut between ranks, with the result of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadfast.config import Config
from steadfast.data.batches import Batch
from steadfast.plan import EvenSamplesPlan, Microbatch
from steadfast.run.directory import RunDirectory
from steadfast.run.events import ForwardsShrunk
from steadfast.run.ledger import read_shares
from steadfast.tasks import LanguageModeling, Sums
from tests.dist.test_global_loss import Clip, clip
from tests.support.claims import CLAIMS, check_equal, check_ledger, check_losses, check_run, check_weights
from tests.support.deaths import Plot, survive
from tests.support.drill import Drilled, Members, drill
from tests.support.gang import MemberFailed
from tests.support.like_nccl import Death
from tests.support.reference import reference
from tests.support.small import VOCABULARY, small

HERE = "tests.dist.test_even_samples"
SLOW = pytest.mark.slow
EVEN_SAMPLES = "batch.balance=even_samples"


def even_samples(storage: Path, *overrides: str) -> Config:
    """Twenty steps of eight microbatches, of which the last one is short."""
    batch = ["batch.global_size=61", "batch.microbatch_size=8", EVEN_SAMPLES, "model.dropout=0"]
    return small(storage, *batch, "run.steps=20", *overrides)


def shares_of(run: Drilled) -> list[tuple[int, ...]]:
    return [tuple(read_shares(line) or ()) for line in run.history.lines]


def test_run_with_parts_equals_one_process_when_a_worker_leaves(tmp_path: Path) -> None:
    config = even_samples(tmp_path)
    run = drill(config, worlds=[4, 3], leave_after=[9])
    check_run(run, reference(config))
    assert shares_of(run) == [(2, 2, 2, 2)] * 10 + [(3, 3, 3)] * 10


@pytest.mark.slow
def test_run_with_parts_equals_one_process_when_a_worker_dies(tmp_path: Path) -> None:
    """In a world without parts, then in one with them."""
    config = even_samples(tmp_path)
    deaths = {1: (2, Death(16, "while it runs")), 2: (3, Death(16, "when it is done"))}
    left = survive(config, Plot(worlds=[[0, 1, 2, 3], [0, 1, 3], [0, 1, 4, 5, 6]], deaths=deaths)).left
    expected = reference(config)
    check_ledger(left, expected)
    check_weights(left, expected)
    assert list(dict.fromkeys(shares_of(left))) == [(2, 2, 2, 2), (3, 3, 3), (2, 2, 2, 2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "worlds"),
    [
        (["parallel.reducer=torch"], [3, 5]),
        (["parallel.kind=fsdp"], [3, 5]),
        (["parallel={kind: fsdp, shard_size: 2}"], [6, 2]),
        (["parallel={kind: fsdp, shard_size: 1, tensor_size: 2}"], [6, 2]),
        (["parallel={kind: fsdp, reshard_after_forward: false, reduce_every_microbatch: true}"], [3, 5]),
        (["data.num_workers=2", "data.prefetch_factor=3"], [3, 5]),
        (["batch.global_size=17"], [3, 2]),  # a step of three microbatches, the last of one sample
        (["run.epochs=3", "batch.global_size=40"], [3, 4]),
        (["memory.activation_checkpointing=full", "parallel.kind=fsdp"], [3, 5]),
        (["recompute.every=1 step", "run.deterministic=true"], [3, 5]),
    ],
)
def test_every_strategy_gives_the_result_of_one_process_with_parts(
    tmp_path: Path, words: list[str], worlds: list[Members]
) -> None:
    config = even_samples(tmp_path, *words)
    check_run(drill(config, worlds, leave_after=[3]), reference(config))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("forward_size", [1, 3])
def test_parts_are_split_again_when_memory_has_run_out(tmp_path: Path, kind: str, forward_size: int) -> None:
    config = even_samples(tmp_path, f"parallel.kind={kind}", "run.steps=8")
    directory = RunDirectory.of(config)
    directory.check_writable()
    directory.record(ForwardsShrunk(step=1, forward_size=forward_size, error="before"))
    check_run(drill(config, worlds=[3, 2], leave_after=[3]), reference(config))


class DrawingClip(Clip):
    """Draws in the loss of the global batch, whose samples no world cuts."""

    def loss(self, embeddings: dict[str, Any]) -> Sums:
        sums = super().loss(embeddings)
        return Sums(sums.loss_sum * (1 + torch.rand(())), sums.count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("global_size", [13, 5])
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


class OwnNorm(nn.Module):
    """Subtracts the mean of the microbatch in training, without a layer that torch knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.training:
            hidden = hidden - hidden.mean(0)
        logits: Tensor = self.head(hidden)
        return logits


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [f"task={{target: '{HERE}:Drawing', args: {{first: 0}}}}", "model.dropout=0"],
            "even_samples: the model or task draws numbers from the generator of torch in a forward",
        ),
        pytest.param(
            [f"task={{target: '{HERE}:Drawing', args: {{first: 30}}}}", "model.dropout=0"],
            "even_samples: the model or task draws numbers from the generator of torch in a forward",
            marks=SLOW,
        ),
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


def drop_a_sample_of_a_part() -> None:
    honest = EvenSamplesPlan._part

    def part(self: EvenSamplesPlan, step: int, rank: int) -> Microbatch:
        found = honest(self, step, rank)
        return found._replace(stop=found.stop - 1) if (step, rank) == (3, 1) else found

    EvenSamplesPlan._part = part


def run_a_part_on_two_ranks() -> None:
    honest = EvenSamplesPlan._part

    def part(self: EvenSamplesPlan, step: int, rank: int) -> Microbatch:
        return honest(self, step, 0 if (step, rank) == (3, 1) else rank)

    EvenSamplesPlan._part = part


def weigh_a_part_as_a_whole_microbatch() -> None:
    honest = LanguageModeling.loss

    def loss(self: LanguageModeling, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums = honest(self, model, batch)
        weight = 8 / len(batch[0]) if model.training else 1
        return Sums(sums.loss_sum * weight, sums.count)

    LanguageModeling.loss = loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "broken"),
    [
        (None, set()),
        (drop_a_sample_of_a_part, {check_ledger, check_weights, check_losses}),
        (run_a_part_on_two_ranks, {check_ledger, check_weights, check_losses}),
        (weigh_a_part_as_a_whole_microbatch, {check_weights, check_losses}),
    ],
)
def test_broken_parts_are_noticed(
    tmp_path: Path, mutation: Callable[[], None] | None, broken: set[Callable[..., None]]
) -> None:
    config = even_samples(tmp_path, "run.steps=5")
    run, expected = drill(config, worlds=[3], patch=mutation, audited=False), reference(config)
    failed = set()
    for claim in CLAIMS:
        try:
            claim(run, expected)
        except AssertionError:
            failed.add(claim)
    assert failed == broken


class Paced(LanguageModeling):
    """Takes a time for each sample."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self._sample_s = sample_s

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        if model.training:
            time.sleep(len(batch[0]) * self._sample_s)
        return super().loss(model, batch)


def fastest_step_s(storage: Path, balance: str, num_workers: int) -> float:
    task = f"task={{target: '{HERE}:Paced', args: {{sample_s: 0.02}}}}"
    batch = ["batch.global_size=96", "batch.microbatch_size=24", f"batch.balance={balance}"]
    config = small(storage, *batch, "model.dropout=0", task, "run.steps=8")
    return float(min(line["step_s"] for line in drill(config, worlds=[num_workers]).history.lines))


@pytest.mark.slow
def test_three_of_four_workers_take_four_thirds_of_a_step(tmp_path: Path) -> None:
    """And twice as long without parts. A microbatch takes 0.48 s; the fastest step is the least disturbed one."""
    assert 0.48 <= fastest_step_s(tmp_path / "four", "even", 4) < 0.6
    assert fastest_step_s(tmp_path / "whole", "even", 3) >= 0.96
    assert 0.64 <= fastest_step_s(tmp_path / "parts", "even_samples", 3) < 0.8
