"""What has become of a run so far, as the leader of another attempt needs to know it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from app.run.directory import RunDirectory
from app.run.events import AttemptStarted, Checkpoint, Event
from app.telemetry.interruptions import read_interruptions


@dataclass(frozen=True)
class Past:
    """Counts over the whole run, and what came between the last attempt and this one."""

    num_failures: int = 0
    num_resizes: int = 0
    num_restarts: int = 0
    interruptions: tuple[str, ...] = ()  # lines of what came between the last attempt and this one
    committed: int = 0  # step of the newest checkpoint
    num_nodes: int = 1  # on which the last attempt trained, as far as it told

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        """Read the events so far, before the first step of an attempt."""
        committed, num_nodes = 0, 1

        def noted() -> Iterator[Event]:
            nonlocal committed, num_nodes
            for event in directory.all_events():
                if isinstance(event, Checkpoint):
                    committed = event.step
                elif isinstance(event, AttemptStarted):
                    num_nodes = len(event.nodes or {}) or 1
                yield event

        interruptions = read_interruptions(noted())
        counts = Counter(each.kind for each in interruptions)
        lines: tuple[str, ...] = ()
        if interruptions and interruptions[-1].attempt is None:
            last = interruptions[-1]
            lines = tuple(f"{last.kind}: {cause}" for cause in last.causes) or (last.kind,)
        return cls(counts["failure"], counts["resize"], counts["restart"], lines, committed, num_nodes)
