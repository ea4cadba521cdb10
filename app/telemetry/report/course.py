"""Gather what the page shows of a run. Of a long one, as many points as a person can see."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Self, TypeVar

from app.run import events
from app.run.directory import METRICS, RunDirectory
from app.run.ledger import Totals
from app.storage.jsonl import is_number, read_lines
from app.telemetry.goodput import Account, TimeLedger, read_totals

_MOST_POINTS = 3000  # of a curve
_MOST_EVENTS = 1000  # of a kind
_ON_THE_WAY_BACK = ("start-up", "re-forming", "restore", "waiting for workers")
_CURVES = ("loss", "step_ms", "data_wait", "units_per_s")

Kind = TypeVar("Kind", bound=events.Event)


class Curve:
    """Figures by step, thinned out as they come. Of a step that was done again the last ones count."""

    def __init__(self, most_points: int = _MOST_POINTS) -> None:
        self._most_points = most_points
        self._stride = 1
        self._num_seen = 0
        self.steps: list[int] = []
        self.rows: list[dict[str, float]] = []

    def add(self, step: int, row: dict[str, float]) -> None:
        again = bisect_left(self.steps, step)
        del self.steps[again:], self.rows[again:]
        self._num_seen += 1
        if self._num_seen % self._stride:
            return
        self.steps.append(step)
        self.rows.append(row)
        if len(self.steps) > self._most_points:
            del self.steps[::2], self.rows[::2]
            self._stride *= 2

    def column(self, name: str) -> list[float]:
        """Return one figure of each step, NaN where it is not known."""
        return [row.get(name, float("nan")) for row in self.rows]


@dataclass(frozen=True)
class Interruption:
    """What it cost that the set of workers changed, or that a command ended before the run."""

    kind: Literal["failure", "resize", "restart"]
    time_s: float  # Unix time of its last step
    step: int  # that the next attempt goes on from
    cause: str
    workers: tuple[int, int]  # before and after
    source: str  # where the state was found
    detected_s: float  # from the last step to the end of the attempt; 0 if nobody was there to see it
    back_s: float  # from there, or from the next command, to the next first step
    lost_steps: int
    redone_s: float  # in steps of this attempt that were done again

    @property
    def lost_s(self) -> float:
        return self.detected_s + self.back_s + self.redone_s


@dataclass
class Course:
    """The course of a run."""

    directory: RunDirectory
    totals: Totals
    ledger: TimeLedger
    figures: Curve = field(default_factory=Curve)
    validations: Curve = field(default_factory=Curve)
    told: dict[type[events.Event], list[Any]] = field(default_factory=dict)  # the events that the page needs, by kind

    @classmethod
    def read(cls, directory: RunDirectory) -> Self:
        totals = read_totals(directory)
        course = cls(directory, totals, TimeLedger(totals, directory.all_events()))
        for event in directory.all_events():
            course._learn(event)
        for line in read_lines(directory.store, METRICS):
            course._add_figures(line)
        return course

    def _learn(self, event: events.Event) -> None:
        if isinstance(event, events.Validation):
            self.validations.add(event.step, dict(event.metrics))
        elif len(self.told.setdefault(type(event), [])) < _MOST_EVENTS:
            self.told[type(event)].append(event)

    def _add_figures(self, line: dict[str, Any]) -> None:
        row = {name: float(line[name]) for name in _CURVES if is_number(line.get(name))}
        if is_number(line.get("step")):
            self.figures.add(int(line["step"]), row)

    def interruptions(self) -> Iterator[Interruption]:
        """Yield what lies between one attempt and the next, oldest first."""
        for before, after in pairwise(account for account in self.ledger.accounts if account.attempt):
            start = self._of_attempt(events.AttemptStarted, after.attempt)
            restore = self._of_attempt(events.Restore, after.attempt)
            kind, cause = self._cause(before, after)
            yield Interruption(
                kind=kind,
                time_s=before.ended_s,
                step=start.step if start else 0,
                cause=cause,
                workers=(before.world_size, after.world_size),
                source=start.source if start else "",
                detected_s=after.seconds.get("detection", 0.0),
                back_s=sum(after.seconds.get(part, 0.0) for part in _ON_THE_WAY_BACK),
                lost_steps=restore.lost_steps if restore else 0,
                redone_s=before.seconds.get("redone", 0.0),
            )

    def _of_attempt(self, kind: type[Kind], attempt: int) -> Kind | None:
        return next((event for event in self.told.get(kind, []) if event.attempt == attempt), None)

    def _cause(self, before: Account, after: Account) -> tuple[Literal["failure", "resize", "restart"], str]:
        end = self._of_attempt(events.AttemptEnded, before.attempt)
        if after.began_s > before.ended_s:
            return "restart", end.cause if end else "the command was ended"
        if end is not None and end.cause == "resized":
            return "resize", self._why_resized(before, after)
        cause = end.cause if end else ""
        for failure in self._between(events.Failure, before, after):
            if failure.member:
                cause += f": {failure.member}, {failure.error}"
                break
        return "failure", cause

    def _why_resized(self, before: Account, after: Account) -> str:
        for preemption in self._between(events.Preemption, before, after):
            return f"node {preemption.node[:8]} was going"
        if self._between(events.Scale, before, after):
            return "other bounds"
        return "a worker came" if after.world_size > before.world_size else "a worker left"

    def _between(self, kind: type[Kind], before: Account, after: Account) -> list[Kind]:
        """Return the events from the first step of one attempt to that of the next."""
        told = self.told.get(kind, [])
        return [event for event in told if before.steps_from_s <= (event.time_s or 0.0) <= after.steps_from_s]
