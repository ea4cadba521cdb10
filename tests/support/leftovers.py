"""Check that a run leaves no process and no shared memory behind."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from tests.support.command import is_alive

SHARED_MEMORY = Path("/dev/shm")


def wait_until_gone(pids: list[int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in alive]
        time.sleep(0.1)  # nobody tells of the death of a process that is not one's child


def mapped() -> set[Path]:
    """Return the files of shared memory that a process still uses: somebody else's."""
    found: set[Path] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has just ended
            found |= {Path(line.split()[5]) for line in maps.read_text().splitlines() if f" {SHARED_MEMORY}/" in line}
    return found
