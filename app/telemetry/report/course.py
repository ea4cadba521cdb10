"""Gather what the page shows of a run. Of a long one, as many points as a person can see."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from app.run import events
from app.run.directory import METRICS, RunDirectory
from app.run.ledger import Totals
from app.storage.jsonl import is_number, read_lines
from app.telemetry.goodput import Account, TimeLedger, read_totals

_MOST_POINTS = 3000  # of a curve
_MOST_EVENTS = 1000  # of a kind
_CURVES = ("loss", "step_ms", "data_wait", "units_per_s")


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

    attempt: int  # that was ended
    time_s: float  # Unix time of its last step
    step: int  # that the next attempt goes on from
    cause: str
    planned: bool
    source: str  # where the state was found
    detected_s: float | None  # from the last step to the end of the attempt; None if nobody was there to see it
    back_s: float  # from there, or from the next command, to the next first step
    lost_steps: int
    redone_s: float  # in steps of this attempt that were done again

    @property
    def lost_s(self) -> float:
        return (self.detected_s or 0.0) + self.back_s + self.redone_s


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
        ended = {event.attempt: event for event in reversed(self.told.get(events.AttemptEnded, []))}
        started = {event.attempt: event for event in self.told.get(events.AttemptStarted, [])}
        restored = {event.attempt: event for event in self.told.get(events.Restore, [])}
        accounts = [account for account in self.ledger.accounts if account.attempt]
        for before, after in zip(accounts, accounts[1:], strict=False):
            end = ended.get(before.attempt)
            start = started.get(after.attempt)
            restore = restored.get(after.attempt)
            same_command = after.began_s <= before.ended_s
            detected_s = after.seconds.get("detection", 0.0) if same_command else None
            yield Interruption(
                attempt=before.attempt,
                time_s=before.ended_s,
                step=start.step if start else 0,
                cause=self._cause(end, before, after),
                planned=end is not None and end.cause in ("resized", "stopped", "finished"),
                source=start.source if start else "",
                detected_s=detected_s,
                back_s=_back_s(after),
                lost_steps=restore.lost_steps if restore else 0,
                redone_s=before.seconds.get("redone", 0.0),
            )

    def _cause(self, end: events.AttemptEnded | None, before: Account, after: Account) -> str:
        if end is None:
            return "the command ended without a word"
        for failure in self.told.get(events.Failure, []):
            if before.ended_s <= (failure.time_s or 0.0) <= after.ended_s and failure.member:
                return f"{end.cause}: {failure.member}, {failure.error}"
        return end.cause


def _back_s(account: Account) -> float:
    parts = ("start-up", "re-forming", "restore", "waiting for workers")
    return sum(account.seconds.get(part, 0.0) for part in parts)
