"""However a run ends, nothing of it is left running."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.checks import check_ledger, summary_of
from tests.support.command import Commands, descendants
from tests.support.leftovers import SHARED_MEMORY, mapped, wait_until_gone

pytestmark = pytest.mark.ray

RAYS_OWN_S = 120.0  # two agents of Ray try for a minute to tell a head that is gone of their end


@pytest.mark.timeout(300)
def test_after_sigkill_of_the_driver_no_process_and_no_shared_memory_is_left(command: Commands) -> None:
    before = set(SHARED_MEMORY.iterdir())
    running = command().start("run.steps=1000000")
    running.wait_for_step(20)
    left = descendants(running.process.pid)
    listening = ports_of(pid for pid, _ in left)
    assert listening
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    wait_until_gone([pid for pid, title in left if not title.startswith(("ray::DashboardA", "ray::RuntimeEnvA"))], 15)
    wait_until_gone([pid for pid, _ in left], RAYS_OWN_S)
    assert set(SHARED_MEMORY.iterdir()) - mapped() <= before
    assert not listening & ports_of(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


@pytest.mark.timeout(240)
def test_sigterm_to_all_processes_of_a_run_is_a_stop_and_loses_nothing(command: Commands) -> None:
    before = set(SHARED_MEMORY.iterdir())
    running = command().start("run.steps=1000000", "checkpoint.every=60 minutes", "data.num_workers=1")
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
    assert set(SHARED_MEMORY.iterdir()) - mapped() <= before


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
