"""Triggers that decide when a periodic act is due."""

import time
from collections.abc import Callable
from typing import Protocol

from steadfast.config import Every

_SECONDS = {"minutes": 60.0, "seconds": 1.0}


class Trigger(Protocol):
    """Decides when a periodic act is carried out."""

    def due(self, step: int) -> bool:
        """Return whether the act follows `step`, the same on every rank."""
        ...

    def wanted(self) -> bool:
        """Return whether this rank requests the act now; the leader's answer counts."""
        ...

    def done(self) -> None:
        """Record that the act has been carried out."""
        ...


class Interval:
    """Trigger of an act with a fixed period; None means never."""

    # Each rank counts steps and epochs by itself. Only the leader's clock measures minutes and seconds, because several
    # clocks would choose different steps: the leader requests the act, the control channel carries the request, and all
    # ranks act after the same step.
    def __init__(
        self,
        every: Every | None,
        epoch: int,  # number of samples
        samples_up_to: Callable[[int], int],  # step -> samples of the run up to that step
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._epoch = epoch
        self._samples_up_to = samples_up_to
        self._clock = clock
        self._since_s = clock()
        self._requested = False
        self._hurried = False

    def begin(self, age_s: float = 0.0) -> None:
        """Begin another attempt, `age_s` seconds or more after the last act."""
        # This leader may be a new worker, whose clock began when the worker joined.
        self._since_s = min(self._since_s, self._clock() - age_s)
        # The other ranks may not have received a request from the last attempt.
        self._requested = False

    def hurry(self) -> None:
        """Make the act due at once, whatever the period."""
        self._hurried = True

    def due(self, step: int) -> bool:
        if self._every is None or self._every.unit in _SECONDS:
            return False
        count = self._every.count
        if self._every.unit == "steps":
            return step % count == 0
        # Not a remainder, because an epoch need not be a whole number of steps.
        period = count * self._epoch
        return self._samples_up_to(step) // period > self._samples_up_to(step - 1) // period

    def wanted(self) -> bool:
        """Return True once when the period has passed, then False until `done`."""
        if self._hurried and not self._requested:
            self._requested = True
            return True
        if self._requested or self._every is None or self._every.unit not in _SECONDS:
            return False
        period_s = self._every.count * _SECONDS[self._every.unit]
        self._requested = self._clock() - self._since_s >= period_s
        return self._requested

    def done(self) -> None:
        self._since_s = self._clock()
        self._requested = False
        self._hurried = False
