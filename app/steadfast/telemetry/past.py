"""Summary of a run's earlier attempts, for the leader of a new attempt."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from steadfast.run.directory import RunDirectory
from steadfast.run.events import AttemptStarted, Checkpoint, Event
from steadfast.telemetry.interruptions import read_interruptions


@dataclass(frozen=True)
class Past:
    """Interruption counts of the whole run, and details of the newest interruption."""

    num_failures: int = 0
    num_resizes: int = 0
    num_restarts: int = 0
    interruptions: tuple[str, ...] = ()  # one line for each cause of the interruption before this attempt
    committed: int = 0  # step of the newest checkpoint
    num_nodes: int = 1  # number of nodes of the last attempt, 1 if unknown

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        """Summarize the run's events up to now.

        Call it before the attempt's first step, so that the events are those of earlier attempts.
        """
        # One pass over the events answers all questions, because the first step waits for this reading.
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
