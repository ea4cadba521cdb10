"""Processes of a run that do not train are killed: the command goes on by itself, and says so."""

from __future__ import annotations

import os
import signal

import pytest

from tests.checks import check_stopped
from tests.command import Commands, Running

pytestmark = pytest.mark.ray

FOR_EVER = "run.steps=1000000"


def kill(running: Running, title: str) -> int:
    """Kill the only process of this command whose title begins so. Return the last step before."""
    (pid,) = running.worker_pids(title)
    last = running.history.last_step
    os.kill(pid, signal.SIGKILL)
    return last


@pytest.mark.timeout(240)
def test_the_coordinator_is_killed_and_the_world_trains_on(on_head: Commands) -> None:
    words = ("parallel.kind=fsdp", "checkpoint.every=20 steps", "scaling.num_workers=[1,2]")
    running = on_head().start(FOR_EVER, *words)
    running.wait_for_event("attempt_started", attempt=1, world_size=2)
    running.wait_for_step(20)
    workers = running.worker_pids("SlotWorker")
    last = kill(running, "ray::Coordinator")
    running.wait_for_step(last + 40)
    told = running.wait_for_event("process_restarted")
    assert told["follows"] == "another one has taken its place, and 2 of 2 workers go on"
    known = running.history.last_step
    running.wait_for_step(known + 40)
    assert running.worker_pids("SlotWorker") == workers
    assert [event["attempt"] for event in running.events if event["event"] == "attempt_started"] == [1]
    assert any(event["event"] == "checkpoint" and event["step"] > known for event in running.events)

    os.kill(workers[0], signal.SIGKILL)
    restored = running.wait_for_event("restore", attempt=2)
    running.wait_for_step(known + 80)
    running.wait_until(lambda: running.history.lines[-1]["step"] > known + 80, "the steps that were lost")
    check_stopped(running, lost_steps=restored["lost_steps"] + 20)
    assert "the coordinator has died: another one has taken its place" in running.output_path.read_text()
