"""Steps that count for nothing, numbers that are none, and gradients that overflow in 16 bits."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.initial import build_initial
from steadfast.checkpoint.weights import read_whole
from steadfast.config import Config
from steadfast.data import SampleOrder
from steadfast.parallel.precision import LossScale
from steadfast.run.directory import RunDirectory
from steadfast.tasks import IGNORED, LanguageModeling, Sums
from tests.support.claims import check_weights
from tests.support.drill import Drilled, drill
from tests.support.gang import MemberFailed
from tests.support.reference import global_batches, reference
from tests.support.small import Tokens, small

HERE = "tests.dist.test_numbers"
NUM_STEPS = 14
GLOBAL_SIZE = 13
NUM_SAMPLES = 240  # none comes twice, some being held out
MASKED = frozenset({1, 6, 7})
PARALLEL = {"ddp": "{kind: ddp}", "torch": "{kind: ddp, reducer: torch}", "fsdp": "{kind: fsdp}"}


class PartlyHidden(Tokens):
    """The tokens of the small run, as many that no sample comes twice; `hidden` ones count for nothing at all."""

    def __init__(self, num_samples: int, hidden: Sequence[int]) -> None:
        super().__init__(num_samples, masked=False)
        self._hidden = frozenset(hidden)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        if index in self._hidden:
            targets = torch.full_like(targets, IGNORED)
        return inputs, targets


class MeanOfNothing(LanguageModeling):
    """A task that forms means, as many do: where everything is masked, its loss is NaN and so are its gradients."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums = super().loss(model, batch)
        return replace(sums, loss_sum=sums.loss_sum / sums.count * sums.count)


class CountsNaN(LanguageModeling):
    def loss(self, model: nn.Module, batch: Any) -> Sums:
        return replace(super().loss(model, batch), count=torch.tensor(float("nan")))


def partly_masked(storage: Path, *overrides: str) -> Config:
    """The small run, in which all samples of the steps MASKED count for nothing."""
    hidden: list[int] = []
    for step in sorted(MASKED):
        hidden += samples_at(storage, (step - 1) * GLOBAL_SIZE, step * GLOBAL_SIZE)
    return with_hidden(storage, hidden, *overrides)


def samples_at(storage: Path, start: int, stop: int) -> list[int]:
    """Return the samples at positions [start, stop) of the small run."""
    order = SampleOrder(NUM_SAMPLES, small(storage).data.held_out_fraction, small(storage).run.seed)
    return [int(index) for index in order.train(np.arange(start, stop))]


def with_hidden(storage: Path, hidden: list[int], *overrides: str) -> Config:
    """The small run, in which the samples `hidden` count for nothing."""
    data = f"data={{target: '{HERE}:PartlyHidden', args: {{num_samples: {NUM_SAMPLES}, hidden: {hidden}}}}}"
    return small(storage, data, *overrides)


@pytest.mark.parametrize("kind", PARALLEL)
@pytest.mark.parametrize("task", ["language_modeling", '{target: "tests.dist.test_numbers:MeanOfNothing"}'])
def test_a_step_in_which_everything_is_masked_changes_nothing(tmp_path: Path, kind: str, task: str) -> None:
    """Neither does decay, nor momentum: the result is that of a run without those steps. And nobody is alarmed."""
    task = task if task.startswith("{") else f"{{kind: {task}}}"
    config = partly_masked(tmp_path, f"parallel={PARALLEL[kind]}", f"task={task}")
    run = drill(config, worlds=[2])
    expected = reference(partly_masked(tmp_path), MASKED)
    check_weights(run, expected)
    assert run.told("rollback", "cause") == []
    lines = [line for _, line in sorted(run.history.committed.items())]
    assert [line["num_samples"] for line in lines] == [GLOBAL_SIZE] * NUM_STEPS
    for line, loss in zip(lines, expected.losses, strict=True):
        assert line["loss"] == pytest.approx(float("nan") if loss is None else loss, abs=1e-10, nan_ok=True)
    assert {int(value) for name, value in run.optimizer.items() if name.endswith("step")} == {NUM_STEPS - len(MASKED)}


def test_what_is_not_finite_is_named(tmp_path: Path) -> None:
    """By the leader, though it is on another rank; and where the run ends, there too."""
    fault = "{kind: nan_at, step: 8, rank: 1, times: null}"
    config = small(tmp_path, "checkpoint.every=3 steps", f"faults.inject=[{fault}]")
    run = drill(config, worlds=[2, 2])
    ids = global_batches(config)[7].ids.tolist()
    (event,) = [event for event in run.events if event["event"] == "rollback"]
    assert event["microbatches"] == [4, 5, 6]  # those of rank 1, of seven
    assert event["samples"] == ids[8:]
    named = f"in microbatches 4, 5, 6, of samples {', '.join(map(str, ids[8:]))}"
    assert event["cause"].endswith(f"at step 8, {named}")

    config = small(tmp_path / "ends", "recovery.max_skipped_steps=0", f"faults.inject=[{fault}]")
    with pytest.raises(MemberFailed, match=re.escape(named)):
        drill(config, worlds=[2])


def test_a_task_whose_loss_of_nothing_is_not_0_is_named_with_the_samples(tmp_path: Path) -> None:
    """Of step 5 the third microbatch is all masked, as a row of Hugging Face's with no label but -100."""
    first = 4 * GLOBAL_SIZE + 2 * small(tmp_path).batch.samples_per_microbatch
    hidden = samples_at(tmp_path, first, first + small(tmp_path).batch.samples_per_microbatch)
    words = ['task={target: "tests.dist.test_numbers:MeanOfNothing"}', "recovery.max_skipped_steps=0"]
    named = (
        f"in microbatches 2, of samples {', '.join(map(str, hidden))}, in which the task "
        "tests.dist.test_numbers:MeanOfNothing counts nothing: there its loss_sum must be 0"
    )
    with pytest.raises(MemberFailed, match=rf"step 5: loss nan.*{re.escape(named)}"):
        drill(with_hidden(tmp_path, hidden, *words), worlds=[2])


def test_a_task_that_counts_no_number_is_named(tmp_path: Path) -> None:
    config = small(tmp_path, f"task.target={HERE}:CountsNaN")
    with pytest.raises(MemberFailed, match=rf"TrainingError: step 1: the task {HERE}:CountsNaN counted nan"):
        drill(config, worlds=[2])


STEPS = 24
TENSOR = "fsdp, tensor_size: 2"
PARTS_IN_STAGES = "pipeline, tensor_size: 2"


def seldom(kind: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.slow)


def overflow_at_once() -> None:
    """Begin with a scale that overflows, and, divided by 1024 three times, overflows again a few updates later."""
    LossScale.initial, LossScale.factor, LossScale.window = 1e15, 1024.0, 4


def drill_in_fp16(config: Config, **named: Any) -> Drilled:
    return drill(config, patch=overflow_at_once, **named)


def config_of(storage: Path, kind: str, *overrides: str) -> Config:
    words = ["model.attention_dropout=0"] if kind in (TENSOR, PARTS_IN_STAGES) else []
    return small(storage, "precision.kind=fp16", f"parallel={{kind: {kind}}}", *words, f"run.steps={STEPS}", *overrides)


def overflows(run: Drilled) -> list[int]:
    return [step for step, line in sorted(run.history.committed.items()) if line.get("overflow")]


def scale_of(config: Config) -> float:
    """The scale of the last checkpoint."""
    catalog = Catalog(RunDirectory.of(config).store)
    newest = catalog.newest()
    assert newest is not None
    return float(read_whole(catalog, newest, "precision")["scale"])


@pytest.mark.parametrize("kind", [*map(seldom, ("ddp", TENSOR, PARTS_IN_STAGES)), "fsdp", "pipeline"])
def test_what_overflows_updates_nothing(tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path, kind, "run.steps=2")
    run = drill_in_fp16(config, worlds=[4 if kind == PARTS_IN_STAGES else 2])
    assert overflows(run) == [1, 2]
    assert run.summary["lost_steps"] == 0
    assert scale_of(config) == pytest.approx(1e15 / 1024**2)
    initial = build_initial(config)[0].state_dict()
    assert all(torch.equal(run.weights[name], initial[name]) for name in initial)
    assert not any(tensor.any() for tensor in run.optimizer.values())


@pytest.mark.parametrize(
    "kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.more), *map(seldom, ("pipeline", TENSOR))]
)
def test_the_scale_goes_on_over_resizes_and_a_resume(tmp_path: Path, kind: str) -> None:
    smallest, largest = (2, 4) if kind in ("pipeline", TENSOR) else (1, 3)
    undisturbed = drill_in_fp16(config_of(tmp_path / "undisturbed", kind), worlds=[smallest])
    expected = overflows(undisturbed)
    assert expected[:4] == [1, 2, 3, 8], "after four updates it grows, and overflows again"
    config = config_of(tmp_path, kind)
    drill_in_fp16(config, worlds=[largest, 2, largest], leave_after=[5, 5], stop_after=4)
    resumed = drill_in_fp16(config, worlds=[2])
    assert overflows(resumed) == expected
    assert scale_of(config) == scale_of(config_of(tmp_path / "undisturbed", kind))
    losses = [line["loss"] for _, line in sorted(resumed.history.committed.items())]
    assert losses == pytest.approx([line["loss"] for line in undisturbed.history.lines], rel=0.02)


def test_a_run_in_fp32_goes_on_in_fp16(tmp_path: Path) -> None:
    drill(small(tmp_path, "precision.kind=fp32", "run.steps=3"), worlds=[2])
    run = drill_in_fp16(config_of(tmp_path, "ddp"), worlds=[2])
    assert overflows(run)[:2] == [4, 5]
