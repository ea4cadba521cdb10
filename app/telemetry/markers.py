"""What has interrupted a run, for the curves that it interrupts."""

from dataclasses import dataclass
from typing import Self

from app.run.directory import RunDirectory
from app.run.events import AttemptEnded, AttemptStarted, Failure


@dataclass(frozen=True)
class Markers:
    """Counts over the whole run, and the lines of what came between the last attempt and this one."""

    num_failures: int
    num_resizes: int
    lines: tuple[str, ...]

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        """Read the events so far, before the first step of an attempt."""
        num_failures = 0
        num_resizes = 0
        lines: list[str] = []
        for event in directory.all_events():
            match event:
                case AttemptStarted():
                    lines.clear()
                case Failure():
                    num_failures += 1
                    lines.append(event.line())
                case AttemptEnded(cause="resized"):
                    num_resizes += 1
                    lines.append(event.line())
        return cls(num_failures, num_resizes, tuple(lines))
