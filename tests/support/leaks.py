"""Detect what a test leaves behind: environment variables, threads and processes."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.processes import is_alive, title_of

PATIENCE_S = 5.0

# Daemons that live as long as the process that has started them: nothing ends them on purpose.
LIFELONG_THREADS = {
    "owner",  # renews a command's claim on its run directory; looks up every few seconds
    "tqdm_monitor",  # of the bars of a library
}

# Servers that fork for tests, one of each for the life of this process. Their forks count as this process's own.
LIFELONG_PROCESSES = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "tests.support.warm")

# Variables that libraries, or worlds for gloo, set when they are first used, and keep on purpose.
LIBRARIES_VARIABLES = ("PYTEST_", "KMP_", "RAY_", "PYTHONBREAKPOINT", "PYTORCH", "TORCH", "TF_", "XLA_", "GLOO_ENABLE_")


@contextmanager
def forbid_leaks(patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Fail if the body leaves an environment variable, a thread or a process behind.

    What a server starts that was there before, such as a Ray head, is the server's: it does not count.

    Args:
        patience_s: for threads and processes to end in.
    """
    variables = _variables()
    threads = set(threading.enumerate())
    processes = _descendants()
    yield
    after = _variables()
    changed = sorted(name for name in {*variables, *after} if variables.get(name) != after.get(name))
    assert not changed, f"environment variables are left changed: {changed}"

    def left() -> list[str]:
        new_threads = [each for each in threading.enumerate() if each not in threads]
        names = [f"thread {each.name}" for each in new_threads if each.name not in LIFELONG_THREADS]
        servers = {pid for pid in processes if not _is_lifelong(pid, processes[pid])}
        for pid, parent in _descendants().items():  # parents first
            if parent in servers:
                servers.add(pid)
            elif pid not in processes and not _is_lifelong(pid, parent) and is_alive(pid):
                names.append(f"process {pid}: {title_of(pid):.200}")
        return names

    # Most need a moment to end.
    until = time.monotonic() + patience_s
    while names := left():
        assert time.monotonic() < until, f"left behind: {names}"
        time.sleep(0.02)


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(LIBRARIES_VARIABLES)}


def _descendants() -> dict[int, int]:
    """Return pid -> parent of all processes below this one, as Linux lists them; elsewhere none.

    psutil would have to look at every process of the machine, which for a thousand tests costs as much as the tests.
    """
    found: dict[int, int] = {}
    parents = [os.getpid()]
    while parents:
        parent = parents.pop()
        for task in Path(f"/proc/{parent}/task").glob("*"):
            with suppress(OSError):  # gone by now
                children = [int(pid) for pid in (task / "children").read_text().split()]
                parents += children
                found.update(dict.fromkeys(children, parent))
    return found


def _is_lifelong(pid: int, parent: int) -> bool:
    """Tell a lifelong server from the processes that it forks, whose command line is the same."""
    return parent == os.getpid() and any(each in title_of(pid) for each in LIFELONG_PROCESSES)
