"""Steps that count for nothing, and numbers that are none: what they do to a run, and whom they name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from steadfast.config import Config
from steadfast.data import SampleOrder
from tests.support.claims import check_weights
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.reference import global_batches, reference
from tests.support.small import small

NUM_STEPS = 14
GLOBAL_SIZE = 13
NUM_SAMPLES = 240  # none comes twice, some being held out
MASKED = frozenset({1, 6, 7})
PARALLEL = {"ddp": "{kind: ddp}", "torch": "{kind: ddp, reducer: torch}", "fsdp": "{kind: fsdp}"}


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
    data = f'data={{target: "tests.dist.masked:PartlyHidden", args: {{num_samples: {NUM_SAMPLES}, hidden: {hidden}}}}}'
    return small(storage, data, *overrides)


@pytest.mark.parametrize("kind", PARALLEL)
@pytest.mark.parametrize("task", ["language_modeling", '{target: "tests.dist.masked:MeanOfNothing"}'])
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
    words = ['task={target: "tests.dist.masked:MeanOfNothing"}', "recovery.max_skipped_steps=0"]
    named = (
        f"in microbatches 2, of samples {', '.join(map(str, hidden))}, in which the task "
        "tests.dist.masked:MeanOfNothing counts nothing: there its loss_sum must be 0"
    )
    with pytest.raises(MemberFailed, match=rf"step 5: loss nan.*{re.escape(named)}"):
        drill(with_hidden(tmp_path, hidden, *words), worlds=[2])


def test_a_task_that_counts_no_number_is_named(tmp_path: Path) -> None:
    config = small(tmp_path, 'task={target: "tests.dist.masked:CountsNaN"}')
    with pytest.raises(MemberFailed, match=r"TrainingError: step 1: the task tests.dist.masked:CountsNaN counted nan"):
        drill(config, worlds=[2])
