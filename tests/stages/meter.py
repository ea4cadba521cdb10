"""CPU seconds of this process and of all processes that it starts, also of those that nobody waits for."""

import contextlib
import os
import resource
import time
from pathlib import Path

_CPUACCT = Path("/sys/fs/cgroup/cpuacct")  # version 1 of Linux's control groups
_UNIFIED = Path("/sys/fs/cgroup")  # version 2
_LOOP = 400_000


class Meter:
    """CPU seconds since the start of this process.

    A control group of Linux counts exactly, but needs root. Elsewhere `exact` is false, and processes count only after
    their parents have waited for them.

    Args:
        parent: control group in which another process has put this one, to be counted in both.
    """

    def __init__(self, parent: str = "") -> None:
        self.group = _enter_group(parent)
        self.exact = bool(self.group)

    def seconds(self) -> float:
        if not self.exact:
            used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
            return sum(each.ru_utime + each.ru_stime for each in used)
        with contextlib.suppress(FileNotFoundError):
            return int(Path(self.group, "cpuacct.usage").read_text()) / 1e9
        return int(Path(self.group, "cpu.stat").read_text().split()[1]) / 1e6

    def close(self) -> None:
        """Take this process out of its group, and remove the group unless another process is still in it."""
        if self.exact:
            with contextlib.suppress(OSError):
                Path(self.group).parent.joinpath("cgroup.procs").write_text(str(os.getpid()))
                Path(self.group).rmdir()


def _enter_group(parent: str) -> str:
    """Make a control group with this process in it, and return its folder, or nothing where that is not allowed."""
    if not parent:
        parent = str(_CPUACCT if _CPUACCT.is_dir() else _UNIFIED)
    group = Path(parent, f"steadfast-tests-{os.getpid()}")
    try:
        group.mkdir(exist_ok=True)
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return ""
    return str(group)


def loop_s() -> float:
    """Return the CPU seconds of a fixed loop, which tell how fast this machine is now."""
    began_s = time.process_time()
    total = 0
    for number in range(_LOOP):
        total += number % 7
    return time.process_time() - began_s
