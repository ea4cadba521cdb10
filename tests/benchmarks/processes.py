"""What a command's processes are and what they burn, from /proc: Linux, and no package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    pid: int
    title: str  # what `ps` shows; Ray's workers put their actor's name there
    cpu_s: float  # user and system, its reaped children left out


def family(root: int) -> list[Process]:
    """`root` and all that descend from it."""
    parents: dict[int, int] = {}
    cpu_s: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _read(f"/proc/{entry}/stat")):
            fields = stat.rpartition(")")[2].split()  # the name before may hold blanks
            parents[int(entry)] = int(fields[1])
            cpu_s[int(entry)] = (int(fields[11]) + int(fields[12])) * _TICK_S
    found = [root] if root in parents else []
    for pid in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == pid]
    return [Process(pid, _read(f"/proc/{pid}/cmdline").replace("\0", " "), cpu_s[pid]) for pid in found]


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:  # it has just ended
        return ""
