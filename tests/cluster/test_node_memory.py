"""The death of all workers at once, long before the first checkpoint."""

from __future__ import annotations

import os
import signal

import pytest

from tests.checks import check_ledger
from tests.cluster.test_slots import OVERRIDES, STEPS
from tests.command import Commands

pytestmark = pytest.mark.ray


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_when_all_workers_are_killed_new_ones_go_on_from_the_nodes_memory(on_head: Commands, kind: str) -> None:
    running = on_head().start(*OVERRIDES, f"parallel.kind={kind}", "checkpoint.every=60 minutes")
    copied = running.wait_for_event("snapshot")
    running.wait_for_step(120)
    for pid in running.worker_pids("SlotWorker"):
        os.kill(pid, signal.SIGKILL)
    restored = running.wait_for_event("restore", source="snapshot")
    finished = running.wait()
    assert finished.code == 0, finished.output
    history = check_ledger(running.directory, STEPS)
    steps_s = [line["step_s"] for line in history.lines if line["attempt"] == 1]
    # A copy is made every so often that all of them take one per cent of the time.
    interval = 100 * copied["stall_s"] / sorted(steps_s)[len(steps_s) // 2]
    print(f"{history.num_lost} steps redone; a copy every {interval:.0f} steps")
    assert history.num_lost == restored["lost_steps"] <= 2 * interval + 10
