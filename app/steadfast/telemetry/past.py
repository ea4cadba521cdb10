"""Summary of a run's earlier attempts, for the leader of a new attempt."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from steadfast.run.directory import RunDirectory
from steadfast.run.events import AttemptStarted, Checkpoint, Event, Rollback, Validation
from steadfast.telemetry.interruptions import Kind, read_interruptions


@dataclass(frozen=True)
class Past:
    """Interruption counts of the whole run, and details of the newest interruption."""

    num_failures: int = 0
    num_resizes: int = 0
    num_restarts: int = 0
    interruptions: tuple[str, ...] = ()  # one line for each cause of the interruption before this attempt
    committed: int = 0  # step of the newest checkpoint
    num_nodes: int = 1  # number of nodes of the last attempt, 1 if unknown
    num_workers: int | None = None  # number of workers of the last attempt
    layout: str | None = None  # of the last attempt
    kind: Kind | None = None  # kind of the interruption before this attempt
    # Metrics of each validation by step, without those of steps that a rollback has taken back.
    validations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        """Summarize the run's events up to now.

        Call it before the attempt's first step, so that the events are those of earlier attempts.
        """
        # One pass over the events answers all questions, because the first step waits for this reading.
        newest: dict[type[Event], Any] = {}
        validations: dict[int, Mapping[str, float]] = {}

        def noted() -> Iterator[Event]:
            for event in directory.all_events():
                newest[type(event)] = event
                match event:
                    case Validation(step=step, metrics=metrics):
                        validations[step] = metrics
                    case Rollback(steps=steps):
                        for step in [step for step in validations if step >= min(steps)]:
                            del validations[step]
                yield event

        interruptions = read_interruptions(noted())
        counts = Counter(each.kind for each in interruptions)
        past = cls(counts["failure"], counts["resize"], counts["restart"], validations=validations)
        if saved := newest.get(Checkpoint):
            past = replace(past, committed=saved.step)
        if started := newest.get(AttemptStarted):
            num_nodes = len(started.nodes or {}) or 1
            past = replace(past, num_nodes=num_nodes, num_workers=started.world_size, layout=started.layout)
        if interruptions and interruptions[-1].attempt is None:
            last = interruptions[-1]
            lines = tuple(f"{last.kind}: {cause}" for cause in last.causes) or (last.kind,)
            past = replace(past, kind=last.kind, interruptions=lines)
        return past
