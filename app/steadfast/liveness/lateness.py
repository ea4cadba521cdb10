"""Measures how overloaded a machine is, to stretch time limits.

On a loaded machine a timed sleep returns late, and all work takes longer too.
"""

import time
from collections import deque
from collections.abc import Callable

_MOST = 5.0  # largest factor for a limit
_USUAL = 0.5  # normal lateness, as a share of the interval


class Lateness:
    """Measures how late the sleeps of one loop return, each of `interval_s`.

    Args:
        gap_s: a sleep that is later than this is not due to load: the process or its machine was stopped.
        window_s: time for which one late sleep stretches the limits.
    """

    def __init__(
        self,
        interval_s: float,
        gap_s: float = 1.0,
        window_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = interval_s
        self._gap_s = gap_s
        self._clock = clock
        self._since_s = clock()
        self._late_s: deque[float] = deque(maxlen=max(1, round(window_s / interval_s)))

    def begin(self) -> None:
        """Record that a sleep begins."""
        self._since_s = self._clock()

    def woke(self) -> tuple[float, bool]:
        """End a sleep; return its watched seconds and whether a gap occurred."""
        slept_s = self._clock() - self._since_s
        self._since_s += slept_s
        late_s = max(0.0, slept_s - self.interval_s)
        gap = late_s > self._gap_s
        if not gap:
            self._late_s.append(late_s)
        # The loop has watched no worker while it slept too long, so that time does not count.
        return min(slept_s, 2 * self.interval_s), gap

    @property
    def stretch(self) -> float:
        """Return the current factor for time limits, at least 1."""
        late = max(self._late_s, default=0.0) / self.interval_s
        return min(_MOST, max(1.0, 1.0 + late - _USUAL))
