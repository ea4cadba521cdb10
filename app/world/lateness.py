"""How late the sleeps of a watcher wake: on a loaded machine everything takes longer, its own looks too."""

import time
from collections import deque
from collections.abc import Callable

_MOST = 5.0  # a limit is never stretched further
_USUAL = 0.5  # lateness that says nothing, as a share of the interval


class Lateness:
    """Follows the sleeps of one loop, each of `interval_s`.

    Args:
        gap_s: a sleep that wakes later than this by more was no load: the process or its machine was stopped.
        window_s: for how long one late sleep stretches the limits.
    """

    def __init__(
        self,
        interval_s: float,
        gap_s: float = 1.0,
        window_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = interval_s
        self._gap_s = gap_s
        self._clock = clock
        self._since_s = clock()
        self._late_s: deque[float] = deque(maxlen=max(1, round(window_s / interval_s)))

    def begin(self) -> None:
        """Take note that a sleep begins."""
        self._since_s = self._clock()

    def woke(self) -> tuple[float, bool]:
        """Take note that the sleep is over. Return its seconds that count as watched, and if there was a gap."""
        slept_s = self._clock() - self._since_s
        self._since_s += slept_s
        late_s = max(0.0, slept_s - self.interval_s)
        gap = late_s > self._gap_s
        if not gap:
            self._late_s.append(late_s)
        # What the watcher has slept through, nobody has been watched for.
        return min(slept_s, 2 * self.interval_s), gap

    @property
    def stretch(self) -> float:
        """Return by how much limits are longer while this watcher wakes late, at least 1."""
        late = max(self._late_s, default=0.0) / self.interval_s
        return min(_MOST, max(1.0, 1.0 + late - _USUAL))
