"""What has become of a run so far, as the leader of another attempt needs to know it."""

from dataclasses import dataclass
from typing import Self

from app.run.directory import RunDirectory
from app.run.events import AttemptEnded, AttemptStarted, Checkpoint, Failure


@dataclass(frozen=True)
class Past:
    """Counts over the whole run, and what came between the last attempt and this one."""

    num_failures: int = 0
    num_resizes: int = 0
    interruptions: tuple[str, ...] = ()  # lines of what came between the last attempt and this one
    committed: int = 0  # step of the newest checkpoint
    num_nodes: int = 1  # on which the last attempt trained, as far as it told

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        """Read the events so far, before the first step of an attempt."""
        num_failures = num_resizes = committed = 0
        num_nodes = 1
        interruptions: list[str] = []
        for event in directory.all_events():
            match event:
                case AttemptStarted(nodes=nodes):
                    interruptions.clear()
                    num_nodes = len(nodes or {}) or 1
                case Failure():
                    num_failures += 1
                    interruptions.append(event.line())
                case AttemptEnded(cause="resized"):
                    num_resizes += 1
                    interruptions.append(event.line())
                case Checkpoint(step=committed):
                    pass
        return cls(num_failures, num_resizes, tuple(interruptions), committed, num_nodes)
