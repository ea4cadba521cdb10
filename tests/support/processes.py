"""The processes that one has started, directly or not, from /proc."""

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLITE_S = 5.0


def adopt_orphans() -> None:
    """From here on what a dead child has started is this process's, and so found and ended."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int | None = None) -> dict[int, str]:
    """pid -> title of every living process below `root`, or below this one, oldest first."""
    parents: dict[int, int] = {}
    for entry in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[entry] = _raylet_of(entry) or int(parent)
    found = [root or os.getpid()]
    for pid in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == pid]
    return {pid: title_of(pid) for pid in sorted(found[1:])}


def _raylet_of(pid: int) -> int | None:
    """Return the raylet of a fork server, whose parent has ended with the first worker of the node."""
    if "orchestration.fork_server" not in title_of(pid):
        return None
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return next((int(each.partition("=")[2]) for each in variables if each.startswith("RAY_RAYLET_PID=")), None)


def end(pids: list[int]) -> None:
    """Asks them to end, then makes them."""
    for number, patience_s in ((signal.SIGTERM, _POLITE_S), (signal.SIGKILL, _POLITE_S)):
        for pid in pids:
            send(pid, number)
        until = time.monotonic() + patience_s
        while (left := descendants().keys() & set(pids)) and time.monotonic() < until:
            time.sleep(0.05)
        pids = list(left)


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def title_of(pid: int) -> str:
    """Return the command line of a process, "" if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def is_alive(pid: int) -> bool:
    """Not gone, and not a zombie that waits for whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
