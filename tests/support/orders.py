"""An order of the user's own, for `data.order.target`, and the digest of samples in an order."""

import numpy as np

from steadfast.data.order import Int64s, sample_keys, uniform


class Weighted:
    """Draws with replacement: the first tenth of the samples comes as often as all others together."""

    def __call__(self, seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
        weights = np.ones(num_samples)
        weights[: max(1, num_samples // 10)] = 9.0
        total = np.cumsum(weights)
        drawn = uniform(seed, epoch, place) * total[-1]
        ids: Int64s = np.searchsorted(total, drawn, side="right")
        return ids


def samples_digest(ids: Int64s, positions: Int64s, seed: int) -> int:
    """Return the sum mod 2^64 of the samples' hashes."""
    return int(sample_keys(ids, positions, seed).sum())
