"""Runs that end with a short step, and are extended: the samples are those of one run, each used once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from steadfast.checkpoint.catalog import path_of
from steadfast.config import Config
from steadfast.launch.resume import start_or_resume
from steadfast.run.directory import RunDirectory
from steadfast.run.events import RunStarted
from tests.support import drill as drills
from tests.support.claims import check_checkpoint, check_run, check_weights
from tests.support.drill import Drilled
from tests.support.reference import reference
from tests.support.small import small

FIRST = 5  # steps of the first epoch: 55 samples, of which the last step has 3


def train(config: Config, worlds: Sequence[int], leave_after: Sequence[int] = ()) -> Drilled:
    """Do what the command does, with a drill in place of a launcher."""
    assert start_or_resume(config, RunDirectory.of(config), RunStarted(launcher="drill"), lambda line: None)
    return drills.drill(config, worlds=worlds, leave_after=leave_after)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_extended_run_equals_one_process_that_leaves_no_sample_out(tmp_path: Path, kind: str) -> None:
    # A rate that the length has no part in.
    words = [f"parallel.kind={kind}", "schedule.kind=constant", "validation.every=1 epoch"]
    train(small(tmp_path, "run.epochs=1", *words), worlds=[2])
    train(small(tmp_path, "run.epochs=2", *words), worlds=[3, 2], leave_after=[2])
    last = small(tmp_path, "run.epochs=4", *words)
    run = train(last, worlds=[2])
    assert run.told("short_step", "position") == [55, 110]
    assert [line["num_samples"] for line in run.history.lines].count(3) == 2
    assert run.told("validation", "step") == [5, 10, 15, 19]  # the steps in which an epoch ends
    check_run(run, reference(last, ended_at=[1, 2]))


def test_a_short_step_that_is_done_again_is_as_short_as_it_was(tmp_path: Path) -> None:
    """Its checkpoint is gone, so the extended run goes on from the one before it."""
    words = ["schedule.kind=constant", "checkpoint.every=2 steps"]
    first = small(tmp_path, "run.epochs=1", *words)
    train(first, worlds=[2])
    directory = RunDirectory.of(first)
    directory.store.delete(path_of(FIRST))
    longer = small(tmp_path, "run.steps=9", *words)
    run = train(longer, worlds=[1])
    assert run.told("restore", "step") == [FIRST - 1]
    expected = reference(small(tmp_path, "run.epochs=2", *words), ended_at=[1])
    lines = run.history.committed
    assert [lines[step]["num_samples"] for step in range(1, 10)] == expected.num_samples[:9]
    assert [lines[step]["samples_digest"] for step in range(1, 10)] == [f"{d:016x}" for d in expected.digests[:9]]
    check_checkpoint(run)

    # In steps and back in epochs: two of them end where they would have without the nine steps.
    run = train(small(tmp_path, "run.epochs=2", *words), worlds=[2])
    check_weights(run, expected)
    assert run.told("short_step", "step") == [FIRST]
