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
    """Proposes other shares when nearly every one of the latest measurements would have gained by them.

    Args:
        shard: how many neighbouring ranks are a replica, which is as fast as its slowest.
    """

    def __init__(self, num_ranks: int, shard: int = 1) -> None:
        self._shard = shard
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

        by_rank_s = np.array(self._measured)  # (measurement, rank)
        measured_s = by_rank_s.reshape(len(by_rank_s), -1, self._shard).max(axis=2)  # (measurement, replica)
        speeds = 1 / np.median(measured_s, axis=0)
        best = fastest_shares(speeds.tolist(), sum(shares), self._shard)
        # A step lasts as long as its slowest replica.
        best_s = (measured_s * self._num_forwards(best)).max(axis=1)
        now_s = (measured_s * self._num_forwards(shares)).max(axis=1)
        gains = np.sort(1 - best_s / now_s)
        if gains[_DISSENTING] < _WORTH:
            return None
        self._measured.clear()
        return Reshare(best, tuple(np.median(by_rank_s, axis=0).tolist()))

    def _num_forwards(self, shares: Shares) -> NDArray[np.int64]:
        """Return how many each replica runs, (replicas,)."""
        forwards: NDArray[np.int64] = np.array(shares).reshape(-1, self._shard).max(axis=1)
        return forwards
