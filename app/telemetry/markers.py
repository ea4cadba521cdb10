"""What has interrupted a run, for the curves that it interrupts."""

from collections import Counter
from dataclasses import dataclass
from typing import Self

from app.run.directory import RunDirectory
from app.telemetry.interruptions import read_interruptions


@dataclass(frozen=True)
class Markers:
    """Counts over the whole run, and the lines of what came between the last attempt and this one."""

    num_failures: int
    num_resizes: int
    num_restarts: int
    lines: tuple[str, ...]

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        """Read the events so far, before the first step of an attempt."""
        interruptions = read_interruptions(directory.all_events())
        counts = Counter(each.kind for each in interruptions)
        lines: tuple[str, ...] = ()
        if interruptions and interruptions[-1].attempt is None:
            last = interruptions[-1]
            lines = tuple(f"{last.kind}: {cause}" for cause in last.causes) or (last.kind,)
        return cls(counts["failure"], counts["resize"], counts["restart"], lines)
