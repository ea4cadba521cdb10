"""Who does not get on, and what with. Told from outside the collectives, so it holds for any backend.

Each worker's training thread marks what it enters; a thread of its lifeline reads that once a heartbeat. Whoever has
come least far makes the others wait for it inside a collective, so it alone is asked whether it takes too long: those
who wait are not, however long they do.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

from app import groups
from app.faults.stacks import stacks

T = TypeVar("T")

# What a rank does between two phases that all ranks enter alike, in the order of one microbatch.
_OWN = {"forward": 1, "backward": 2, "loader": 3, "update": 4}
_ALL_LEFT = 1 << 30
_REMEMBERED = 512  # durations of a phase
_A_WHILE_S = 0.5
_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class Limits:
    """How long a phase may take: five times what nearly all before it took, and never less than these.

    step_s: the phases of a step. rare_s: those that wait for storage, where a hiccup of some seconds is ordinary.
    unseen_s: a phase that has never been completed: start-up, compilation, the first checkpoint.
    """

    step_s: float = 3.0
    rare_s: float = 10.0
    unseen_s: float = 300.0

    def of(self, phase: str, durations: list[float]) -> float:
        if not durations:
            return self.unseen_s
        p99 = sorted(durations)[int(0.99 * len(durations))]
        return max(self.step_s if phase in _OWN or phase == "collective" else self.rare_s, 5 * p99)


@dataclass(frozen=True)
class Snapshot:
    """How far a worker is. Small, and travels as JSON.

    position: compares among the workers of an attempt, whatever their shares.
    step: the last one that it has done. seconds: in this phase. limit_s: for it; None for ever.
    spent_s: in each phase that was completed in this attempt.
    """

    attempt: int
    rank: int
    position: list[int]
    step: int
    phase: str
    seconds: float
    limit_s: float | None
    spent_s: dict[str, float]


class Progress:
    """One a process. The training thread writes, at half a microsecond a mark; another reads `snapshot()`.

    Args:
        gap_s: counts at most, of a time in which nobody looked: then this whole process, or its machine, was stopped.
    """

    def __init__(
        self, limits: Limits | None = None, gap_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits, self._gap_s, self._clock = limits or Limits(), gap_s, clock
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._looked_s, self._seen_since_s, self._seconds = clock(), -1.0, 0.0
        self._turn, self._step = 0, 0
        self.begin(attempt=0, rank=0)
        self.leave()

    def begin(self, attempt: int, rank: int) -> None:
        """This thread takes part in an attempt; until anything else is marked, it builds."""
        self._attempt, self._rank, self._thread = attempt, rank, threading.get_ident()
        self._turn, self._step = 0, 0
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._at = "build", self._clock(), self._turn, _ALL_LEFT

    def enter(self, phase: str, step: int | None = None) -> None:
        """A phase that all ranks enter in the same order; `step`, where one has just been done."""
        self._turn += 1
        self._step = self._step if step is None else step
        self.mark(phase, _ALL_LEFT)

    def mark(self, phase: str, left: int | None = None) -> None:
        """A phase of this rank's own.

        Args:
            left: microbatches that this rank has to run in the step after this one; None if it is still the same.
        """
        now = self._clock()
        before, since, _, same = self._at
        self._durations[before].append(now - since)
        self._spent[before] += now - since
        self._at = phase, now, self._turn, same if left is None else left

    def fetching(self, batches: Iterator[T]) -> Iterator[T]:
        """`batches`, the wait for each of which is the loader phase."""
        while True:
            self.mark("loader")
            try:
                fetched = next(batches)
            except StopIteration:
                return
            yield fetched

    def leave(self) -> None:
        """The attempt is over for this worker. What it was in was not completed, so it does not count."""
        self._turn += 1
        self._at = "idle", self._clock(), self._turn, _ALL_LEFT

    def snapshot(self) -> Snapshot:
        """From one other thread, in intervals of at most `gap_s`. Copying a deque or dict of floats is atomic."""
        now = self._clock()
        phase, since, turn, left = self._at
        if since != self._seen_since_s:
            self._seen_since_s, self._seconds = since, 0.0
        self._seconds += min(now - max(since, self._looked_s), self._gap_s)
        self._looked_s = now
        return Snapshot(
            attempt=self._attempt,
            rank=self._rank,
            position=[turn, -left, _OWN.get(phase, 0), self._is_in_collective()],
            step=self._step,
            phase=phase,
            seconds=round(self._seconds, 3),
            limit_s=None if phase == "idle" else round(self._limits.of(phase, list(self._durations[phase])), 3),
            spent_s={name: round(seconds, 4) for name, seconds in self._spent.copy().items()},
        )

    @property
    def phase(self) -> str:
        return self._at[0]

    def stacks(self) -> str:
        """What every other thread of this process is doing, the training thread first of all."""
        return stacks(self._thread)

    def _is_in_collective(self) -> int:
        """Of two who have come equally far, one that is in a collective waits for one that is in anything else. Asked
        of those alone who have been where they are for a while."""
        frame = sys._current_frames().get(self._thread) if self._seconds > _A_WHILE_S else None
        return int(frame is not None and frame.f_code.co_filename.startswith((_TORCH, groups.__file__)))


@dataclass(frozen=True)
class Stall:
    """Nobody gets on. members, ranks: those whom the `waiting` wait for; several where they have come equally far."""

    members: tuple[str, ...]
    ranks: tuple[int, ...]
    phase: str
    step: int
    seconds: float
    waiting: tuple[str, ...]


class Watchdog:
    """Finds stalls in what the workers of a world say of themselves, looked at again and again.

    Args:
        settled_s: somebody has to have been last for so long; longer than two heartbeats. What they say is not of one
            moment: when a long wait is over, those who have not said so yet would look as if they were the last.
    """

    def __init__(self, settled_s: float = 2.5) -> None:
        self._settled_s = settled_s
        self._last: dict[str, tuple[int, ...]] = {}  # where they are who have come least far
        self._seconds: dict[str, float] = {}  # how long they had been there when it turned out

    def look(self, snapshots: Mapping[str, Snapshot]) -> Stall | None:
        """`snapshots` by member, of the whole world. All who have come least far must be beyond their limits."""
        places = {member: (each.attempt, *each.position) for member, each in snapshots.items()}
        last = {member: place for member, place in places.items() if place == min(places.values())}
        slow = [snapshots[member] for member in last]
        if last != self._last:
            self._last, self._seconds = last, {member: snapshots[member].seconds for member in last}
        settled = all(snapshots[member].seconds - self._seconds[member] >= self._settled_s for member in last)
        if not slow or not settled or any(each.limit_s is None or each.seconds <= each.limit_s for each in slow):
            return None
        return Stall(
            members=tuple(last),
            ranks=tuple(each.rank for each in slow),
            phase=slow[0].phase,
            step=slow[0].step,
            seconds=max(each.seconds for each in slow),
            waiting=tuple(member for member in snapshots if member not in last),
        )


@dataclass(frozen=True)
class Straggler:
    """lost_s: in every step the others wait so long for it, most of it in `phase`. share: of the step."""

    member: str
    rank: int
    phase: str
    lost_s: float
    share: float


def straggler(before: Mapping[str, Snapshot], after: Mapping[str, Snapshot], least: float = 0.1) -> Straggler | None:
    """Who makes the others wait, from two looks at a world; None if nobody does for at least the share `least`.

    Time in data and forward is a rank's own; what is left of a step it may have spent waiting.
    """
    alike = [member for member in after if member in before and before[member].attempt == after[member].attempt]
    steps = min((after[member].step - before[member].step for member in alike), default=0)
    if len(alike) < 2 or steps < 1:
        return None

    def per_step(member: str, phase: str) -> float:
        return (after[member].spent_s.get(phase, 0.0) - before[member].spent_s.get(phase, 0.0)) / steps

    def excess(member: str, phase: str) -> float:
        return per_step(member, phase) - median(per_step(each, phase) for each in alike if each != member)

    def lost(member: str) -> float:
        return excess(member, "loader") + excess(member, "forward")

    slowest = max(alike, key=lost)
    share = lost(slowest) / max(1e-9, sum(per_step(slowest, phase) for phase in after[slowest].spent_s))
    if share < least:
        return None
    phase = max(("loader", "forward"), key=lambda phase: excess(slowest, phase))
    return Straggler(slowest, after[slowest].rank, phase, round(lost(slowest), 4), round(share, 3))
