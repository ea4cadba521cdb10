"""Faults by configuration, in whole runs: they strike, the run goes on the next time, and the result is right."""

from pathlib import Path
from typing import Any

import pytest
import torch

from steadfast.config import ProfileConfig
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from steadfast.telemetry.memory_history import record_memory_history, write_memory_history
from steadfast.world.runtime import World
from tests.support.claims import check_checkpoint, check_ledger, check_losses, check_weights
from tests.support.drill import drill
from tests.support.events import event_lines
from tests.support.gang import MemberFailed
from tests.support.history import read_ledger
from tests.support.reference import reference
from tests.support.small import small


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("{kind: fail_at, step: 7, rank: 1}", "InjectedFault: injected at step 7"),
        ("{kind: kill_at, step: 7, rank: 1}", "process 1: gone"),
        ("{kind: kill_at, step: 4, rank: 1, phase: checkpoint}", "process 1: gone"),
        ("{kind: nan_at, step: 7, rank: 1}", "step 7: loss nan, gradient norm nan: not finite"),
    ],
)
def test_a_fault_strikes_once_and_the_run_that_is_resumed_is_right(tmp_path: Path, fault: str, seen: str) -> None:
    config = small(tmp_path, f"faults.inject=[{fault}]", "checkpoint.every=3 steps", "recovery.max_skipped_steps=0")
    with pytest.raises(MemberFailed, match=seen):
        drill(config, worlds=[2])
    assert read_ledger(LocalStore(tmp_path / "small")).last_step <= 7
    resumed, expected = drill(config, worlds=[2]), reference(config)
    check_weights(resumed, expected)
    check_checkpoint(resumed)
    assert sorted(resumed.history.committed) == list(range(1, 15))


def test_a_worker_that_is_out_of_memory_tells_of_its_allocations_first(tmp_path: Path) -> None:
    config = small(tmp_path, "faults.inject=[{kind: oom_at, step: 7, rank: 1}]", "profile.memory_history=1000")
    drill(config, worlds=[2, 2], patch=as_on_a_gpu)
    written = tmp_path / "small" / "profile" / "memory-attempt-1-rank-1.pickle"
    assert written.read_text() == "[1000] allocations"
    told = [event for event in event_lines(RunDirectory.of(config)) if event["event"] == "memory_history"]
    assert [(event["attempt"], event["rank"], event["path"]) for event in told] == [(1, 1, str(written))]


def as_on_a_gpu() -> None:
    """Have the history of memory asked for and written as if the device were a GPU."""
    cuda = torch.device("cuda")
    asked: list[int] = []

    def write(config: ProfileConfig, directory: RunDirectory, world: World, _: torch.device, error: Any) -> Any:
        return write_memory_history(config, directory, world, cuda, error)

    patch = pytest.MonkeyPatch()  # of a process that ends with the drill
    patch.setattr("torch.cuda.memory._record_memory_history", lambda max_entries, stacks: asked.append(max_entries))
    patch.setattr("torch.cuda.memory._dump_snapshot", lambda path: Path(path).write_text(f"{asked} allocations"))
    patch.setattr("steadfast.worker.record_memory_history", lambda config, _: record_memory_history(config, cuda))
    patch.setattr("steadfast.worker.write_memory_history", write)


def test_a_worker_that_drains_ends_the_attempt_and_nothing_is_done_twice(tmp_path: Path) -> None:
    config = small(tmp_path, "faults.inject=[{kind: drain_at, step: 5, rank: 2}]")
    run, expected = drill(config, worlds=[3, 2]), reference(config)
    for check in (check_ledger, check_weights, check_losses, check_checkpoint):
        check(run, expected)
    assert run.told("attempt_ended", "cause") == ["resized", "finished"]
    assert run.told("fault_injected", "kind") == ["drain_at"]
    assert {line["world_size"] for line in run.history.lines} == {3, 2}
