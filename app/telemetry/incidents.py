"""What each change of the world cost: between the last step of one attempt and the first one of the next."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from app.run.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    Failure,
    Preemption,
    ProcessRestarted,
    Restore,
    Rollback,
    RunStarted,
    Scale,
)
from app.units import plural

_ENDS = ("finished", "stopped")  # of which the next command makes a resume


@dataclass(frozen=True)
class Incident:
    """Something that made a run begin another attempt, and what it cost."""

    time_s: float  # Unix time at which the first that is known of it was written down
    causes: tuple[str, ...]  # in words; none where workers joined or left by agreement
    attempt: int | None = None  # that followed; None if none has yet
    world_sizes: tuple[int, int] | None = None  # before and after
    detected_s: float | None = None  # from the last step before to the end of the former attempt
    back_s: float | None = None  # from the last step before to the first one after
    lost_steps: int = 0  # finished steps that were done again
    source: str = ""  # where the state was found


@dataclass
class _Reader:
    incidents: list[Incident] = field(default_factory=list)
    began_s: float | None = None
    causes: list[str] = field(default_factory=list)
    lost_steps: int = 0
    world_size: int | None = None  # of the last attempt, None before the first one

    def note(self, event: Event, cause: str = "") -> None:
        if self.began_s is None:
            self.began_s = event.time_s
        if cause and cause not in self.causes:
            self.causes.append(cause)

    def add(self, event: AttemptStarted) -> None:
        """End what has been noted with the attempt that followed."""
        former, self.world_size = self.world_size, event.world_size
        pending = self.pending()
        self.began_s, self.causes, self.lost_steps = None, [], 0
        if former is None or pending is None:
            return
        starting_s = event.formed_s + event.built_s + event.restored_s + event.first_step_s
        ended = replace(
            pending,
            attempt=event.attempt,
            world_sizes=(former, event.world_size),
            detected_s=event.detected_s,
            back_s=event.detected_s + starting_s,
            source=event.source,
        )
        self.incidents.append(ended)

    def pending(self) -> Incident | None:
        if self.began_s is None or self.world_size is None:
            return None
        return Incident(self.began_s, tuple(self.causes), lost_steps=self.lost_steps)


def read_incidents(events: Iterable[Event]) -> list[Incident]:
    """Return what made a run begin its attempts but the first, oldest first; the last may not be over."""
    reader = _Reader()
    for event in events:
        match event:
            case AttemptStarted():
                reader.add(event)
            case Restore():
                reader.lost_steps += event.lost_steps
            case AttemptEnded() if event.cause not in _ENDS:
                reader.note(event)
            case Failure() | Preemption() | Scale() | Rollback() | ProcessRestarted() | RunStarted():
                reader.note(event, _cause(event))
    pending = reader.pending()
    return [*reader.incidents, pending] if pending else reader.incidents


def _cause(event: Event) -> str:
    match event:
        case Failure(member=None):
            return event.error
        case Failure():
            where = f" on node {event.node[:8]}" if event.node else ""
            what = "loss" if event.kind == "worker" else event.kind or "failure"
            return f"{what} of worker {event.member}{where}"
        case Preemption():
            return f"node {event.node[:8]} is going with {plural(len(event.members), 'worker')}"
        case Scale():
            return event.line()
        case Rollback():
            return f"rolled back: {event.cause}"
        case ProcessRestarted():
            return f"{event.process} has died"
    return "the command was given again"
