"""Check that a run leaves no process and no shared memory behind."""

import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.support import processes
from tests.support.command import is_alive

SHARED_MEMORY = Path("/dev/shm")
_RAYS_AGENTS = ("ray::DashboardA", "ray::RuntimeEnvA")
_RAYS_AGENTS_S = 120.0  # they try for a minute to report their end to a head that is gone


def wait_until_gone(pids: list[int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in alive]
        time.sleep(0.1)  # nobody tells of the death of a process that is not one's child


def wait_until_ray_is_gone(found: list[tuple[int, str]], limit_s: float, agents_too: bool) -> None:
    """Wait for processes of a Ray, given with their titles. Its agents are killed, or waited for."""
    agents = [pid for pid, title in found if title.startswith(_RAYS_AGENTS)]
    wait_until_gone([pid for pid, _ in found if pid not in agents], limit_s)
    if agents_too:
        wait_until_gone(agents, _RAYS_AGENTS_S)
    for pid in agents:
        processes.send(pid, signal.SIGKILL)
    wait_until_gone(agents, limit_s)


def mapped() -> set[Path]:
    """Return the files of shared memory that a process still uses: somebody else's."""
    found: set[Path] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has just ended
            found |= {Path(line.split()[5]) for line in maps.read_text().splitlines() if f" {SHARED_MEMORY}/" in line}
    return found


def wait_until_memory_is_free(before: set[Path], limit_s: float = 15.0) -> None:
    """Fail if files that were not there `before`, and that no process uses, stay so long: other tests make some too."""
    until = time.monotonic() + limit_s
    while left := set(SHARED_MEMORY.iterdir()) - mapped() - before:
        assert time.monotonic() < until, left
        time.sleep(0.2)
