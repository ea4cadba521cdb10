"""Progress of a worker, marked by its training thread.

Another thread reads and reports it.
"""

import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from steadfast.world import communicator, groups
from steadfast.world.clock import HostClock
from steadfast.world.report import ProgressReport
from steadfast.world.stacks import stacks

T = TypeVar("T")

# Phases that a rank enters on its own, between two phases of all ranks: in the order of one microbatch.
_LOCAL = {"forward": 1, "backward": 2, "loader": 3, "gradients": 4, "update": 5}
_COMPILE = "compile"
_ALL_LEFT = 1 << 30  # the first microbatch of the step has not begun
_REMEMBERED = 512  # durations kept per phase
_A_WHILE_S = 0.5
_IN_COLLECTIVES = (os.path.dirname(torch.__file__) + os.sep, groups.__file__, communicator.__file__)


@dataclass(frozen=True)
class Limits:
    """Lower bounds of the time limits of phases.

    The limit of a phase is five times the 99th percentile of its former durations, and at least its lower bound.
    """

    step_s: float = 3.0  # for phases of a step
    rare_s: float = 10.0  # for phases that wait for storage, where some more seconds are normal
    unseen_s: float = 300.0  # for phases that were never completed, such as the first checkpoint, and all compilations

    def of(self, phase: str, durations: list[float]) -> float:
        """Return the limit of a phase, from former durations, in seconds."""
        # The duration of one compilation says nothing about that of another function.
        if not durations or phase == _COMPILE:
            return self.unseen_s
        p99 = sorted(durations)[int(0.99 * len(durations))]
        in_step = phase in _LOCAL or phase == "collective"
        least_s = self.step_s if in_step else max(self.step_s, self.rare_s)
        return max(least_s, 5 * p99)


class _Mark(NamedTuple):
    # One object, because another thread reads it and could see separate attributes partly updated.
    phase: str
    since_s: float
    turn: int  # number of phases that all ranks have entered
    left: int  # microbatches of the step that have not begun
    place: int  # position of the phase within a microbatch


class Progress:
    """Progress of one process through the phases of an attempt, such as "forward".

    The training thread marks its phases, and one other thread reads `report()`.

    Args:
        gap_s: the most that counts of a time without a report, in which this process or its machine was stopped.
    """

    def __init__(
        self, limits: Limits | None = None, gap_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits or Limits()
        self._gap_s = gap_s
        self._clock = clock
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._interrupted: _Mark | None = None  # the phase that a compilation interrupts
        self.reading: Callable[[], str] = str  # `Loader.reading`, once there is a loader
        # State of the reading thread.
        self._reported_s = clock()
        self._reported_mark: _Mark | None = None
        self._seconds = 0.0
        self.begin(attempt=0, rank=0)
        self.leave()

    @property
    def phase(self) -> str:
        return self._mark.phase

    def begin(self, attempt: int, rank: int, device_clock: HostClock | None = None) -> None:
        """Begin an attempt, on the training thread, in the phase "build"."""
        self._attempt = attempt
        self._rank = rank
        self._device_clock = device_clock or HostClock()
        self._device_began: Any = None  # marks around a step's microbatches on the device
        self._device_ended: Any = None
        self._device_s = 0.0
        self._thread = threading.get_ident()
        self._step = 0
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._mark = _Mark("build", self._clock(), 0, _ALL_LEFT, 0)

    def resume(self, step: int) -> None:
        """Record the step from which the attempt continues."""
        self._step = step

    def enter(self, phase: str, step: int | None = None) -> None:
        """Mark a phase of all ranks, and any `step` just finished."""
        if step is not None:
            self._step = step
        self._complete(phase, self._mark.turn + 1, _ALL_LEFT)

    def mark(self, phase: str, left: int | None = None) -> None:
        """Mark a phase of this rank alone.

        Args:
            left: number of microbatches after this one, if it has changed.
        """
        if left is None:
            left = self._mark.left
        self._complete(phase, self._mark.turn, left)
        if self._device_clock.on_device:
            self._mark_device(phase)

    def _mark_device(self, phase: str) -> None:
        if phase == "forward" and self._device_began is None:
            self._device_began = self._device_clock.mark()
        elif phase == "gradients":
            self._device_ended = self._device_clock.mark()
        elif phase == "update" and self._device_began is not None:
            # The gate comes before the update, so both marks have passed.
            self._device_s += self._device_clock.between_s(self._device_began, self._device_ended)
            self._device_began = self._device_ended = None

    def compiling(self) -> None:
        """Mark a compilation of any length within a phase, until `compiled`."""
        if self._mark.phase in ("idle", _COMPILE):
            return
        self._interrupted = self._mark
        now_s = self._clock()
        self._spent[self._mark.phase] += now_s - self._mark.since_s
        self._mark = self._mark._replace(phase=_COMPILE, since_s=now_s)

    def compiled(self) -> None:
        """Mark the end of the compilation, and continue the interrupted phase."""
        if self._mark.phase != _COMPILE or self._interrupted is None:
            return
        now_s = self._clock()
        self._spent[_COMPILE] += now_s - self._mark.since_s
        self._mark = self._interrupted._replace(since_s=now_s)

    def fetching(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches, marking each wait as the loader phase."""
        while True:
            self.mark("loader")
            try:
                fetched = next(batches)
            except StopIteration:
                return
            yield fetched

    def spent_s(self, phase: str) -> float:
        """Return this attempt's seconds of completed phases of this name.

        Call it on the training thread.
        """
        return self._spent[phase]

    def leave(self) -> None:
        """Leave the attempt, and enter the phase "idle".

        The interrupted phase is incomplete, so its seconds are neither in `spent_s` nor in the durations from which the
        limits of phases follow.
        """
        self._mark = _Mark("idle", self._clock(), self._mark.turn + 1, _ALL_LEFT, 0)

    def report(self) -> ProgressReport:
        """Return this worker's progress. One thread calls this at least every `gap_s`."""
        now_s = self._clock()
        mark = self._mark
        if mark is not self._reported_mark:
            self._reported_mark = mark
            self._seconds = 0.0
        # A longer time without a report means that this process or its machine was stopped, not that the phase hangs.
        self._seconds += min(now_s - max(mark.since_s, self._reported_s), self._gap_s)
        self._reported_s = now_s

        # The training thread writes to both meanwhile. Copying a deque or dict of floats is atomic, a loop is not.
        durations = list(self._durations[mark.phase])
        spent_s = self._spent.copy()
        limit_s = None
        if mark.phase != "idle":
            limit_s = round(self._limits.of(mark.phase, durations), 3)
        # Positions are compared as lists, and a greater one is further: fewer microbatches left are more progress.
        return ProgressReport(
            attempt=self._attempt,
            rank=self._rank,
            position=[mark.turn, -mark.left, mark.place, self._is_done_on_device(), self._is_in_collective()],
            step=self._step,
            phase=mark.phase,
            seconds=round(self._seconds, 3),
            limit_s=limit_s,
            spent_s={phase: round(seconds, 4) for phase, seconds in spent_s.items()},
            device_s=round(self._device_s, 4),
            reading=self.reading(),
        )

    def stacks(self) -> str:
        """Return the stacks of all threads but this one, training thread first."""
        return stacks(self._thread)

    def _complete(self, phase: str, turn: int, left: int) -> None:
        now_s = self._clock()
        before = self._mark
        self._durations[before.phase].append(now_s - before.since_s)
        self._spent[before.phase] += now_s - before.since_s
        self._mark = _Mark(phase, now_s, turn, left, _LOCAL.get(phase, 0))

    def _is_done_on_device(self) -> int:
        # Hosts that have launched all their work wait alike for the gradients' sums. They wait for the rank whose
        # device still computes.
        ended = self._device_ended
        if ended is None:
            return 0
        try:
            return int(self._device_clock.passed(ended))
        except RuntimeError:  # the device has failed
            return 0

    def _is_in_collective(self) -> int:
        # If two ranks are at the same position, the one inside a collective waits for the one outside. A rank that has
        # just entered the phase is not examined, because it is not suspect yet.
        if self._seconds <= _A_WHILE_S:
            return 0
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_code.co_filename == threading.__file__:  # waits for a lock
            frame = frame.f_back
        return int(frame is not None and frame.f_code.co_filename.startswith(_IN_COLLECTIVES))
