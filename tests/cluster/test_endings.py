"""However a run ends, nothing of it is left running; one whose run another command has taken leaves it alone."""

import json
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.checks import check_ledger, summary_of
from tests.support.command import FOR_EVER, STANDALONE, Commands, Running, descendants
from tests.support.leftovers import SHARED_MEMORY, wait_until_gone, wait_until_memory_is_free, wait_until_ray_is_gone


@pytest.mark.alone
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("agents_too", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_after_sigkill_of_the_driver_no_process_or_shared_memory_is_left(command: Commands, agents_too: bool) -> None:
    before = set(SHARED_MEMORY.iterdir())
    running = command().start(FOR_EVER)
    running.wait_for_step(20)
    left = descendants(running.process.pid)
    listening = ports_of(pid for pid, _ in left)
    assert listening
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    wait_until_ray_is_gone(left, 15, agents_too)
    wait_until_memory_is_free(before)
    assert not listening & ports_of(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


@pytest.mark.alone
@pytest.mark.ray
@pytest.mark.timeout(240)
def test_sigterm_to_all_processes_of_a_run_is_a_stop_and_loses_nothing(command: Commands) -> None:
    before = set(SHARED_MEMORY.iterdir())
    running = command().start(FOR_EVER, "checkpoint.every=60 minutes", "data.num_workers=1")
    running.wait_for_step(20, timeout_s=150)
    started = descendants(running.process.pid)
    # As a service manager sends it to all of a service, here in the worst order.
    for pid in [*reversed([pid for pid, _ in started]), running.process.pid]:
        with suppress(ProcessLookupError):  # a helper of Ray's, whose end is nobody's loss
            os.kill(pid, signal.SIGTERM)
    stopped = running.wait()
    assert stopped.code == 3, stopped.output
    summary = summary_of(running.directory)
    assert check_ledger(running.directory, summary["step"]).num_lost == 0
    assert [event["attempt"] for event in running.events if event["event"] == "attempt_started"] == [1]
    wait_until_gone([pid for pid, _ in started], 60)
    wait_until_memory_is_free(before)


def ports_of(pids: Iterable[int]) -> set[str]:
    """Inodes of the listening TCP sockets that these processes hold."""
    listening = {fields[9] for fields in map(str.split, tcp_lines()) if fields[3] == "0A"}
    held: set[str] = set()
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:  # it has just ended
            continue
        held |= {link[8:-1] for link in links if link.startswith("socket:")}
    return listening & held


def tcp_lines() -> list[str]:
    return [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


OVERRIDES = [FOR_EVER, "checkpoint.every=1000 seconds"]


def take_over(folder: Path) -> str:
    """As a command elsewhere does, after a pause of this one's that was longer than a lease."""
    owner = json.loads((folder / "owner.json").read_text())
    others = {**owner, "token": "another", "host": "elsewhere", "renewed": time.time()}
    (folder / "new").write_text(json.dumps(others))
    (folder / "new").replace(folder / "owner.json")
    return (folder / "owner.json").read_text()


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_a_command_whose_run_is_taken_over_ends_and_says_so_on_ray(on_head: Commands) -> None:
    check_taken_over(on_head("taken").start(*OVERRIDES))


@pytest.mark.timeout(240)
def test_a_command_whose_run_is_taken_over_ends_and_says_so_under_torchrun(command: Commands) -> None:
    check_taken_over(command("taken", launcher=STANDALONE).start(*OVERRIDES))


def check_taken_over(running: Running) -> None:
    """It ends within the interval in which it renews its claim, and without a failure that would make it look."""
    running.wait_for_step(5)
    owner = take_over(running.directory)
    ended = running.wait(40)
    assert ended.code in (1, 2)
    assert "error: another command has taken over" in ended.output
    assert "on elsewhere" in ended.output
    assert (running.directory / "owner.json").read_text() == owner
    assert not (running.directory / "checkpoints").exists()
