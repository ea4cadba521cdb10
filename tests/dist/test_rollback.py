"""Steps whose numbers are bad: rolled back, left out, and the run goes on unattended."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from torch import nn

from steadfast.config import Config, DdpConfig
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel.replicated import ReplicatedParallelism
from steadfast.plan import Amendments
from steadfast.world.runtime import World
from tests.support import drill as drills
from tests.support.claims import check_checkpoint, check_weights
from tests.support.drill import Drilled
from tests.support.gang import MemberFailed
from tests.support.patches import wait_for_storage
from tests.support.reference import CPU, reference
from tests.support.small import small


@pytest.fixture(params=["ddp", "fsdp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


drill = partial(drills.drill, patch=wait_for_storage)


def check_left_out(run: Drilled, config: Config, *steps: int) -> None:
    """Claim: the run is one in which `steps` have never been, and its ledger says which samples are missing."""
    expected = reference(config, frozenset(steps))
    lines = [line for _, line in sorted(run.history.committed.items())]
    assert [line["step"] for line in lines] == list(range(1, len(expected.losses) + 1))
    assert [line["num_samples"] for line in lines] == expected.num_samples
    assert [line["samples_digest"] for line in lines] == [f"{digest:016x}" for digest in expected.digests]
    assert [line["loss"] for line in lines] == pytest.approx(expected.losses, abs=1e-10)
    size = config.batch.global_size
    assert {line["step"]: line["positions"] for line in lines if line.get("skipped")} == {
        step: [(step - 1) * size, step * size] for step in steps
    }
    assert run.summary["samples"] == sum(expected.num_samples)
    check_weights(run, expected)
    check_checkpoint(run)


def check_told(run: Drilled, causes: list[str], restored_to: list[int]) -> None:
    """Claim: the events say why, and where the run went on."""
    told = run.told("rollback", "cause")
    assert len(told) == len(causes)
    assert all(cause in said for cause, said in zip(causes, told, strict=True))
    assert run.told("restore", "step") == restored_to


def test_a_step_that_is_not_finite_is_left_out(tmp_path: Path, kind: str) -> None:
    """It would not be finite the next time either."""
    fault = "{kind: nan_at, step: 8, rank: 1, times: null}"
    config = small(tmp_path, f"parallel.kind={kind}", "checkpoint.every=3 steps", f"faults.inject=[{fault}]")
    run = drill(config, worlds=[2, 2])
    check_left_out(run, config, 8)
    check_told(run, ["loss nan, gradient norm nan at step 8"], [6])
    assert run.summary["lost_steps"] == 1


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_first_and_the_last_step_may_be_left_out(tmp_path: Path, kind: str) -> None:
    """Before the first there is no checkpoint, after the last no word to be read."""
    faults = "{kind: nan_at, step: 1, rank: 1}, {kind: nan_at, step: 14, rank: 0}"
    config = small(tmp_path, f"parallel.kind={kind}", "checkpoint.every=14 steps", f"faults.inject=[{faults}]")
    run = drill(config, worlds=[2, 3, 1])
    check_left_out(run, config, 1, 14)
    check_told(run, ["at step 1", "at step 14"], [])
    assert run.told("attempt_started", "step") == [0, 0, 0]


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_spike_is_left_out_and_where_it_comes_back_the_step_before_it_too(tmp_path: Path, kind: str) -> None:
    """The checkpoint of step 35 holds what step 35 did, so it is not where the second rollback leads to; it neither
    stays nor displaces those that are good; and it gives way to one of a lower step, as a run that is stopped writes.
    """
    faults = ", ".join(f"{{kind: spike_at, step: {step}, rank: 1, factor: 50, times: null}}" for step in (36, 37))
    overrides = ["run.steps=42", "checkpoint.every=5 steps", "checkpoint.keep_last=2", f"faults.inject=[{faults}]"]
    config = small(tmp_path, f"parallel.kind={kind}", *overrides)
    stopped = drill(config, worlds=[2, 2, 2], stop_after=2)
    check_told(stopped, ["against a median of"] * 2, [35, 30])
    assert stopped.summary["status"] == "stopped"
    assert 30 < stopped.summary["step"] < 35
    assert Path(stopped.summary["last_checkpoint"]).name == f"step-{stopped.summary['step']:08d}"
    check_left_out(drill(config, worlds=[2]), config, 35, 36, 37)


def test_what_is_left_out_stays_so_when_the_run_is_resumed(tmp_path: Path) -> None:
    """It is not read again either, so a fault that is over strikes nobody; loader processes leave it out too."""
    fault = "faults.inject=[{kind: nan_at, step: 8, rank: 1}]"
    config = small(tmp_path, "data.num_workers=1", "checkpoint.every=3 steps", fault)
    assert drill(config, worlds=[2, 2], stop_after=2).summary["status"] == "stopped"
    check_left_out(drill(config, worlds=[3]), config, 8)


@pytest.mark.parametrize(("budget", "said"), [(0, ": not finite. Lower"), (1, "1 steps are left out already")])
def test_when_too_much_is_left_out_the_run_ends_with_a_remedy(tmp_path: Path, budget: int, said: str) -> None:
    faults = ", ".join(f"{{kind: nan_at, step: {step}, rank: 1}}" for step in (4, 8))
    config = small(tmp_path, f"recovery.max_skipped_steps={budget}", f"faults.inject=[{faults}]")
    with pytest.raises(MemberFailed, match=r"TrainingError: step (4|8): loss nan, gradient norm nan") as failed:
        drill(config, worlds=[2, 2])
    assert said in str(failed.value)


class Alone(ReplicatedParallelism):
    def wrap(self, model: nn.Module) -> nn.Module:
        return model  # there is nobody to send gradients to


def test_a_survivor_that_did_not_hear_of_a_bad_step_does_not_bring_its_poison_along(tmp_path: Path) -> None:
    worker = WorkerState(small(tmp_path), CPU)
    world = World(0, 1, 1, cast(Any, None), Amendments(frozenset({3})))
    parallel = Alone(DdpConfig(), world, worker.precision)
    worker.prepare(world, parallel)
    poisoned = worker.model
    worker.advance_to(9)
    worker.prepare(world, parallel)
    assert (worker.model, worker.held.step) == (poisoned, 9)
    worker.prepare(replace(world, amendments=Amendments(frozenset({3, 8}))), parallel)
    assert worker.model is not poisoned
    assert worker.held.step == 0
