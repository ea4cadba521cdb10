"""When something periodic is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.config import Every


class Trigger:
    """Steps and epochs are counted, so every rank knows by itself. Minutes and seconds are read off one clock: the
    leader raises `wanted()`, once until `done()`; the control word carries it, and all ranks act on the same step.

    Args:
        every: the period; None is never.
        steps_per_epoch: optimizer steps in one pass over the training samples, not necessarily whole.
    """

    def __init__(
        self, every: Every | None, steps_per_epoch: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every, self._steps_per_epoch, self._clock = every, steps_per_epoch, clock
        self._since, self._raised = clock(), False

    def begin(self, age_s: float = 0.0) -> None:
        """Another attempt: what was raised in the last one may not have been heard. `age_s`: at least so long ago it
        was done last, as far as others know."""
        self._since, self._raised = min(self._since, self._clock() - age_s), False

    def due(self, step: int) -> bool:
        if self._every is None or self._every.unit not in ("steps", "epochs"):
            return False
        scale = self._steps_per_epoch if self._every.unit == "epochs" else 1.0
        period = self._every.count * scale
        return step // period > (step - 1) // period

    def wanted(self) -> bool:
        if self._raised or self._every is None or self._every.unit not in ("minutes", "seconds"):
            return False
        period_s = self._every.count * (60 if self._every.unit == "minutes" else 1)
        self._raised = self._clock() - self._since >= period_s
        return self._raised

    def done(self) -> None:
        self._since, self._raised = self._clock(), False
