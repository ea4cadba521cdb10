"""Interruptions of a run and their costs, read from its events.

Status, report and trackers all use this reading.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from steadfast.run.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    Failure,
    ForwardsShrunk,
    Preemption,
    ProcessRestarted,
    RanksDiffer,
    Restore,
    Rollback,
    RunStarted,
    Scale,
)
from steadfast.units import node_name, plural

Kind = Literal["failure", "resize", "restart"]

_ENDS = ("finished", "stopped")  # causes that end a command; an interruption follows only with the next command


@dataclass(frozen=True)
class Interruption:
    """Time between two attempts: the workers changed, or a command ended before the run."""

    kind: Kind
    time_s: float  # Unix time at which the end of the attempt before was first known
    causes: tuple[str, ...]  # in words
    ended: int | None  # the attempt before
    # The fields below are known once another attempt has begun.
    attempt: int | None = None
    step: int | None = None  # step of the state that the new attempt continues from
    workers: tuple[int, int] | None = None  # number before and after
    source: str = ""  # source of the restored state
    detected_s: float | None = None  # failures only: from the last step to the end of the attempt, or to the restart
    back_s: float | None = None  # from that end or restart, or from the next command, to the next first step
    lost_steps: int = 0  # finished steps that were done again
    redone_s: float = 0.0  # seconds in lost steps, if the reader has read the ledger

    @property
    def cause(self) -> str:
        """Return all causes as one text."""
        return "; ".join(self.causes)

    @property
    def lost_s(self) -> float:
        """Return the seconds that the interruption cost, as far as known."""
        return (self.detected_s or 0.0) + (self.back_s or 0.0) + self.redone_s


def read_interruptions(events: Iterable[Event], redone_s: Mapping[int, float] | None = None) -> list[Interruption]:
    """Return the interruptions of a run, oldest first; the last may not be over.

    Args:
        events: all kept events, in the order in which they were written.
        redone_s: seconds in steps that were done again, by attempt. Only a caller that has read the ledger has them.
    """
    found: list[Interruption] = []
    before: AttemptStarted | None = None
    between = _Between()
    for event in events:
        if not isinstance(event, AttemptStarted):
            between.note(event)
            continue
        if before is not None:
            found.append(between.interruption(before, event))
        before, between = event, _Between()
    if before is not None and between.has_ended:
        found.append(between.pending(before))
    known = redone_s or {}
    return [replace(each, redone_s=known.get(each.ended or 0, 0.0)) for each in found]


@dataclass
class _Between:
    """Events between the first steps of two attempts."""

    told: list[Event] = field(default_factory=list)  # events that name a cause
    ended: AttemptEnded | None = None
    lost_steps: int = 0
    reported: bool = False  # whether the command has recorded its own end
    again_s: float | None = None  # Unix time at which the same command restarted
    command_s: float | None = None  # Unix time at which another command began

    def note(self, event: Event) -> None:
        match event:
            case AttemptEnded() if event.cause not in _ENDS:
                self.ended = self.ended or event
            case AttemptEnded():
                self.reported = True
            case Restore():
                self.lost_steps = event.lost_steps  # the last event is of the attempt that finishes a step
            case RunStarted(again=True):
                self.told.append(event)
                self.again_s = self.again_s or event.time_s
            case RunStarted():
                self.told.append(event)
                self.command_s = event.time_s
            case (
                Failure() | ForwardsShrunk() | Preemption() | Scale() | Rollback() | RanksDiffer() | ProcessRestarted()
            ):
                self.told.append(event)
                self.reported = self.reported or (isinstance(event, Failure) and event.fatal)

    @property
    def has_ended(self) -> bool:
        """Return whether the attempt before is over.

        A failure of a single member, such as a spare, is no proof of that.
        """
        if self.ended or self.again_s is not None or self.command_s is not None:
            return True
        return any(isinstance(event, Failure) and event.member is None for event in self.told)

    @property
    def kind(self) -> Kind:
        if self.command_s is not None:
            return "restart"
        if self.ended and self.ended.cause == "resized":
            return "resize"
        return "failure"

    def pending(self, before: AttemptStarted) -> Interruption:
        ends_s = [self.again_s, self.command_s]
        if self.ended:
            ends_s.append(self.ended.time_s)
        first_s = min(filter(None, ends_s), default=0.0)
        # torchrun records a failure, but no end of the attempt.
        if not first_s and self.told:
            first_s = self.told[-1].time_s or 0.0
        return Interruption(self.kind, first_s, self._causes(), before.attempt)

    def interruption(self, before: AttemptStarted, after: AttemptStarted) -> Interruption:
        """Return the interruption between two attempts that both finished a step."""
        first_step_s = (after.time_s or 0.0) - (after.step_s or 0.0)  # when the first step began
        last_step_s = (after.time_s or 0.0) - after.ready_in_s
        since_s = last_step_s  # when the run learned that it needs another attempt
        if self.command_s is not None:
            since_s = self.command_s
        elif self.again_s is not None:
            since_s = self.again_s
        elif self.ended and self.ended.time_s:
            since_s = self.ended.time_s
        causes = self._causes()
        # Without a preemption or a change of the bounds, only the sizes of the two worlds tell what has happened.
        if self.kind == "resize" and not causes:
            causes = ("a worker left",)
            if after.world_size > before.world_size:
                causes = ("a worker joined",)
        # A new command and a change of the world that all workers agree on need no detection.
        detected_s = None
        if self.kind == "failure":
            detected_s = max(0.0, since_s - last_step_s)
        pending = self.pending(before)
        return replace(
            pending,
            time_s=pending.time_s or last_step_s,
            causes=causes,
            attempt=after.attempt,
            step=after.step,
            workers=(before.world_size, after.world_size),
            source=after.source,
            detected_s=detected_s,
            back_s=max(0.0, first_step_s - since_s),
            lost_steps=self.lost_steps,
        )

    def _causes(self) -> tuple[str, ...]:
        causes: dict[str, None] = {}  # a dictionary, to drop repeated causes and keep their order
        for event in self.told:
            # A new worker may have failed before the resize, which did not affect the workers in the world.
            if self.kind != "resize" or isinstance(event, Preemption | Scale):
                causes[_in_words(event, self.reported)] = None
        if not causes and self.ended and self.kind == "failure":
            return (self.ended.cause,)
        return tuple(causes)


def _in_words(event: Event, reported: bool) -> str:
    match event:
        case Failure(rank=int()):
            return _first_line(event.line())
        case Failure(member=None):
            return _first_line(event.error)
        case Failure():
            worker = f"worker {event.member}"
            if event.node:
                worker += f" on node {node_name(event.node)}"
            what = event.kind or "failure"
            if event.kind == "worker":
                what = "loss"
            return f"{what} of {worker}: {_first_line(event.error)}"
        case ForwardsShrunk():
            where = "" if event.rank is None else f" on rank {event.rank}"
            return f"out of memory{where}: a forward pass now takes at most {plural(event.forward_size, 'sample')}"
        case Preemption():
            return f"node {node_name(event.node)} is preempted with {plural(len(event.members), 'worker')}"
        case Scale() | RanksDiffer():
            return event.line()
        case Rollback():
            return f"rolled back: {event.cause}"
        case ProcessRestarted():
            return f"{event.process} has died"
        case RunStarted(again=True, launcher="torchrun"):
            return "torchrun has restarted its ranks"
        case RunStarted(again=True):
            return "the command restarted"
    if reported:
        return "the command was run again"
    return "the command ended without a report, and was run again"


def _first_line(error: str) -> str:
    return error.partition("\n")[0]
