"""The death of all workers at once, long before the first checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from app.checkpoint.node_memory import memory_name
from app.config import parse_config
from app.run.directory import RunDirectory
from app.run.owner import read_key
from app.storage import LocalStore
from tests.checks import check_audit, check_stopped, summary_of
from tests.cluster.test_slots import FOR_EVER
from tests.command import Commands

pytestmark = pytest.mark.ray


def holders(directory: Path) -> list[int]:
    """The processes that hold snapshots of a run."""
    key = read_key(LocalStore(directory))
    assert key
    name = memory_name(str(directory), key)
    return [each.pid for each in psutil.process_iter(["cmdline"]) if name in (each.info["cmdline"] or ())]


def wait_until_gone(directory: Path) -> None:
    until = time.monotonic() + 15
    while holders(directory):
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_when_all_workers_are_killed_new_ones_go_on_from_the_nodes_memory(on_head: Commands, kind: str) -> None:
    words = ("scaling.num_workers=[1,2]", f"parallel.kind={kind}", "checkpoint.every=60 minutes")
    running = on_head().start(FOR_EVER, *words)
    # On a busy machine a start takes as long as all that follows.
    copied = running.wait_for_event("snapshot", timeout_s=150)
    running.wait_for_step(120)
    assert len(holders(running.directory)) == 1
    for pid in running.worker_pids("SlotWorker"):
        os.kill(pid, signal.SIGKILL)
    restored = running.wait_for_event("restore", source="snapshot")
    running.wait_until(lambda: running.history.lines[-1]["step"] > restored["step"] + restored["lost_steps"], "news")
    check_stopped(running, lost_steps=restored["lost_steps"])
    history = running.history
    steps_s = [line["step_s"] for line in history.lines if line["attempt"] == 1]
    # A copy is made every so often that all of them take one per cent of the time.
    interval = 100 * copied["stall_s"] / sorted(steps_s)[len(steps_s) // 2]
    print(f"{history.num_lost} steps redone; a copy every {interval:.0f} steps")
    assert history.num_lost == restored["lost_steps"] <= 2 * interval + 10
    wait_until_gone(running.directory)


@pytest.mark.timeout(240)
def test_the_nodes_memory_goes_with_the_command(on_head: Commands) -> None:
    running = on_head().start(FOR_EVER)
    running.wait_for_event("snapshot", timeout_s=150)
    assert len(holders(running.directory)) == 1
    running.process.kill()
    wait_until_gone(running.directory)


@pytest.mark.timeout(300)
def test_a_command_that_was_to_stop_when_ray_died_saves_what_the_nodes_memory_holds(command: Commands) -> None:
    running = command().start(FOR_EVER, "checkpoint.every=60 minutes")
    copied = running.wait_for_event("snapshot", timeout_s=150)
    running.wait_for_step(120)
    (raylet,) = running.worker_pids("/raylet/raylet")
    os.kill(running.process.pid, signal.SIGTERM)
    os.kill(raylet, signal.SIGKILL)
    stopped = running.wait(150)
    assert stopped.code == 3, stopped.output
    assert "the command starts again from the newest state, to save it and stop" in stopped.output
    summary = summary_of(running.directory)
    config = parse_config((running.directory / "config.yaml").read_text())
    # It need not have come again to where it was.
    assert check_audit(RunDirectory(LocalStore(running.directory)), config).steps >= summary["step"]
    # Of the copies, or of a checkpoint for which a worker had the time.
    restored = next(event for event in running.events if event["event"] == "restore")
    assert copied["step"] <= restored["step"] < summary["step"]
    wait_until_gone(running.directory)
