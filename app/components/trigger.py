"""When something periodic is due."""

import time
from collections.abc import Callable
from typing import Protocol

from app.config import Every

_SECONDS = {"minutes": 60.0, "seconds": 1.0}


class Trigger(Protocol):
    """Decides when a periodic act is carried out."""

    def due(self, step: int) -> bool:
        """Return whether the act follows `step`. Every rank must come to the same answer by itself."""
        ...

    def wanted(self) -> bool:
        """Return whether this rank requests the act now. Only the leader's answer counts, and all ranks are told."""
        ...

    def done(self) -> None:
        """Take note that the act has been carried out."""
        ...


class Interval:
    """The trigger of something that happens every so often; a period of None is never."""

    # Steps and epochs are counted, so every rank knows by itself. Minutes and seconds are read off one clock, since two
    # would name different steps: the leader requests the act, the control channel carries the request, and all ranks
    # act at the same step.
    def __init__(
        self,
        every: Every | None,
        epoch: int,  # samples in one
        samples_up_to: Callable[[int], int],  # a step, of the whole run
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
        """Begin another attempt. The act was last carried out at least `age_s` ago, as far as others know."""
        # The leader may be new, and then its own clock began when it joined.
        self._since_s = min(self._since_s, self._clock() - age_s)
        # What was requested in the last attempt may not have reached the others.
        self._requested = False

    def hurry(self) -> None:
        """Let the act be due at once, whatever the period."""
        self._hurried = True

    def due(self, step: int) -> bool:
        if self._every is None or self._every.unit in _SECONDS:
            return False
        count = self._every.count
        if self._every.unit == "steps":
            return step % count == 0
        # Not a remainder: an epoch need not be a whole number of steps.
        period = count * self._epoch
        return self._samples_up_to(step) // period > self._samples_up_to(step - 1) // period

    def wanted(self) -> bool:
        """Return True once the time has come, and then False until `done`."""
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
