"""When measured speeds justify other shares. Pure, so it is tested with a table."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.plan import Shares, fastest_shares

# Measurements of equal workers differ too. In 50,000 of them, 20 % apart (standard deviation), 11 of 12 never agreed by
# chance; medians of a sliding window agreed hundreds of times, since neighbouring ones share most of their values.
_MEASUREMENTS = 12
_DISSENTING = 1
_WORTH = 0.05  # of a step's time; a finer gain is not worth another order of sums


class Reshare(NamedTuple):
    """A decision: other shares, and the seconds of a microbatch by rank that they follow from."""

    shares: Shares
    microbatch_s: tuple[float, ...]


class SpeedPolicy:
    """Proposes other shares when nearly every one of the latest measurements would have gained by them."""

    def __init__(self, num_ranks: int) -> None:
        self._known_s = np.zeros(num_ranks)
        self._measured: deque[NDArray[np.float64]] = deque(maxlen=_MEASUREMENTS)

    def decide(self, microbatch_s: Sequence[float], shares: Shares) -> Reshare | None:
        """Return other shares if they are worth it. Once some have been proposed, everything is measured anew.

        Args:
            microbatch_s: seconds of a microbatch by rank; 0 from a rank that has nothing new to say.
            shares: those in force.
        """
        latest_s = np.array(microbatch_s)
        self._known_s = np.where(latest_s == 0, self._known_s, latest_s)
        if self._known_s.all():
            self._measured.append(self._known_s)
        if len(self._measured) < _MEASUREMENTS:
            return None

        measured_s = np.array(self._measured)  # (measurement, rank)
        typical_s = np.median(measured_s, axis=0)
        best = fastest_shares((1 / typical_s).tolist(), sum(shares))
        # A step lasts as long as its slowest rank.
        best_s = (measured_s * np.array(best)).max(axis=1)
        now_s = (measured_s * np.array(shares)).max(axis=1)
        gains = np.sort(1 - best_s / now_s)
        if gains[_DISSENTING] < _WORTH:
            return None
        self._measured.clear()
        return Reshare(best, tuple(typical_s.tolist()))
