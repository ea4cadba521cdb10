"""The death of all workers at once, or of the command, long before the first checkpoint."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.memory_server import server_name
from steadfast.config import parse_config
from steadfast.run.directory import RunDirectory
from steadfast.run.owner import read_key
from steadfast.storage import LocalStore
from tests.support.checks import check_audit, check_finished, check_identical, check_ledger, check_stopped, summary_of
from tests.support.command import FOR_EVER, Command, Commands, Running

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STEPS = 120


def memory_of(directory: Path) -> str:
    """Return the name of the process that holds snapshots of a run; a run has another one once it has ended."""
    key = read_key(LocalStore(directory))
    assert key
    return server_name(str(directory), key)


def holders(name: str) -> list[int]:
    """Return the processes of this name."""
    return [each.pid for each in psutil.process_iter(["cmdline"]) if name in (each.info["cmdline"] or ())]


def wait_until_gone(name: str, limit_s: float = 15.0) -> None:
    until = time.monotonic() + limit_s
    # A process that ends loses its command line before its sockets.
    while holders(name) or name in Path("/proc/net/unix").read_text():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_when_all_workers_are_killed_new_ones_go_on_from_the_nodes_memory(on_head: Commands, kind: str) -> None:
    words = ("scaling.num_workers=[1,2]", f"parallel.kind={kind}", "checkpoint.every=60 minutes")
    running = on_head().start(FOR_EVER, *words)
    # On a busy machine a start takes as long as all that follows.
    copied = running.wait_for_event("snapshot", timeout_s=150)
    running.wait_for_step(60)
    name = memory_of(running.directory)
    assert len(holders(name)) == 1
    for pid in running.worker_pids():
        os.kill(pid, signal.SIGKILL)
    restored = running.wait_for_event("restore", source="snapshot")
    running.wait_until(lambda: running.history.lines[-1]["step"] > restored["step"] + restored["lost_steps"], "news")
    check_stopped(running, lost_steps=restored["lost_steps"])
    history = running.history
    interval = steps_between_copies(running, copied)
    assert history.num_lost == restored["lost_steps"] <= 2 * interval + 10
    wait_until_gone(name)


def steps_between_copies(running: Running, copied: dict[str, Any]) -> float:
    """Return how many steps of the first attempt lie between two copies, of which an event tells of one."""
    steps_s = [line["step_s"] for line in running.history.lines if line["attempt"] == 1]
    # A copy is made every so often that all of them take one per cent of the time.
    return float(100 * copied["stall_s"] / sorted(steps_s)[len(steps_s) // 2])


def check_the_next_command_goes_on_from_copies(run: Command, *words: str) -> None:
    words = (*words, f"run.steps={STEPS}", "checkpoint.every=60 minutes")
    killed = run.start(*words, "faults.inject=[{kind: slow_at, ranks: [0, 1], ms: 20}]")
    copied = killed.wait_for_event("snapshot", timeout_s=150)
    killed.wait_for_step(60)
    name = memory_of(run.directory)
    server = holders(name)
    killed.process.kill()
    killed.wait()

    resumed = run.start(*words)
    restored = resumed.wait_for_event("restore", source="snapshot", timeout_s=150)
    assert holders(name) == server  # there is one, and it has outlived the command
    check_finished(resumed)
    interval = steps_between_copies(resumed, copied)
    history = check_ledger(run.directory, STEPS)
    assert history.num_lost == restored["lost_steps"] <= 2 * interval + 10
    wait_until_gone(name)


@pytest.mark.timeout(480)
def test_the_same_command_goes_on_from_the_copies_of_one_that_was_killed_with_its_ray(command: Commands) -> None:
    run, undisturbed = command("killed"), command("undisturbed")
    check_the_next_command_goes_on_from_copies(run)
    assert undisturbed.run(f"run.steps={STEPS}", "checkpoint.node_memory=false").code == 0
    check_identical(run.directory, undisturbed.directory)


@pytest.mark.slow
def test_the_same_command_goes_on_from_the_copies_of_one_that_was_killed_on_a_cluster(on_head: Commands) -> None:
    check_the_next_command_goes_on_from_copies(on_head(), "parallel.kind=fsdp")


@pytest.mark.slow
def test_copies_end_with_a_command_that_fails(on_head: Commands) -> None:
    run = on_head()
    failing = run.start(
        "run.steps=1000", "parallel.kind=fsdp", "faults.inject=[{kind: fail_at, step: 100, times: null}]"
    )
    failing.wait_for_event("snapshot", timeout_s=150)
    name = memory_of(run.directory)
    assert len(holders(name)) == 1
    failed = failing.wait(150)
    assert failed.code == 1, failed.output
    wait_until_gone(name)
    assert memory_of(run.directory) != name


@pytest.mark.slow
def test_nothing_of_a_killed_commands_copies_is_left_where_no_other_follows_in_time(command: Commands) -> None:
    running = command().start(FOR_EVER, "recovery.wait_s=6")
    running.wait_for_event("snapshot", timeout_s=150)
    name = memory_of(running.directory)
    running.process.kill()
    running.wait()
    time.sleep(3)
    assert len(holders(name)) == 1
    wait_until_gone(name, limit_s=30)


@pytest.mark.slow
def test_a_command_that_was_to_stop_when_ray_died_saves_what_the_nodes_memory_holds(command: Commands) -> None:
    running = command().start(FOR_EVER, "checkpoint.every=60 minutes")
    copied = running.wait_for_event("snapshot", timeout_s=150)
    running.wait_for_step(120)
    name = memory_of(running.directory)
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
    # From the copies, or from a checkpoint for which the workers had the time; not at all if they stopped in order.
    restored = [event["step"] for event in running.events if event["event"] == "restore"]
    assert all(copied["step"] <= step < summary["step"] for step in restored), (copied, restored, summary)
    assert Catalog(LocalStore(running.directory)).newest() == summary["step"]
    wait_until_gone(name)
