"""Policy that decides when measured speeds justify new shares.

The policy is pure, so a table can test it.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadfast.plan import Shares, fastest_shares

# Measurements of equal workers differ too. In 50,000 simulated measurements, 20 % apart (standard deviation), 11 of 12
# never agreed by chance. Medians of a sliding window agreed hundreds of times, because neighbouring medians share most
# of their values.
_MEASUREMENTS = 12
_DISSENTING = 1
_WORTH = 0.05  # share of a step's time; a smaller gain is not worth another order of sums


class Reshare(NamedTuple):
    """Decision for new shares, and the median seconds per microbatch by rank."""

    shares: Shares
    microbatch_s: tuple[float, ...]


class SpeedPolicy:
    """Policy that proposes new shares if nearly all recent measurements gain.

    Args:
        replica_size: number of neighbouring ranks in a replica, which is as fast as its slowest rank.
    """

    def __init__(self, num_ranks: int, replica_size: int = 1) -> None:
        self._replica_size = replica_size
        self._known_s = np.zeros(num_ranks)
        self._measured: deque[NDArray[np.float64]] = deque(maxlen=_MEASUREMENTS)

    def decide(self, microbatch_s: Sequence[float], shares: Shares) -> Reshare | None:
        """Return new shares if the gain is worth the change.

        After a proposal everything is measured again.

        Args:
            microbatch_s: seconds per microbatch by rank; 0 from a rank without a new measurement.
            shares: current shares.
        """
        latest_s = np.array(microbatch_s)
        self._known_s = np.where(latest_s == 0, self._known_s, latest_s)
        if self._known_s.all():
            self._measured.append(self._known_s)
        if len(self._measured) < _MEASUREMENTS:
            return None

        by_rank_s = np.array(self._measured)  # (measurement, rank)
        measured_s = by_rank_s.reshape(len(by_rank_s), -1, self._replica_size).max(axis=2)  # (measurement, replica)
        speeds = 1 / np.median(measured_s, axis=0)
        best = fastest_shares(speeds.tolist(), sum(shares), self._replica_size)
        # A step lasts as long as its slowest replica.
        best_s = (measured_s * self._num_forwards(best)).max(axis=1)
        now_s = (measured_s * self._num_forwards(shares)).max(axis=1)
        gains = np.sort(1 - best_s / now_s)
        if gains[_DISSENTING] < _WORTH:
            return None
        self._measured.clear()
        return Reshare(best, tuple(np.median(by_rank_s, axis=0).tolist()))

    def _num_forwards(self, shares: Shares) -> NDArray[np.int64]:
        """Return the number of forwards of each replica, (replicas,)."""
        forwards: NDArray[np.int64] = np.array(shares).reshape(-1, self._replica_size).max(axis=1)
        return forwards
