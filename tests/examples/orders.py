"""Orders of samples: batches of similar lengths, and easy samples first."""

from collections.abc import Sequence

import numpy as np

from steadfast.data.order import Int64s, uniform


class LengthBuckets:
    """Samples of similar length follow each other, so that batches need little padding.

    Each epoch has every sample once, and the batches in another order.

    Args:
        lengths: of each training sample.
        batch: samples of a batch.
    """

    def __init__(self, lengths: Sequence[int], batch: int) -> None:
        self._sorted = np.argsort(np.array(lengths), kind="stable")
        self._batch = batch
        self._num_batches = len(lengths) // batch

    def __call__(self, seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
        number, within = np.divmod(place, self._batch)
        for each in np.unique(epoch):
            batches = np.arange(self._num_batches)
            shuffled = np.argsort(uniform(seed, np.full_like(batches, each), batches), kind="stable")
            # The samples that fill no batch stay at the end.
            its = (epoch == each) & (number < self._num_batches)
            number[its] = shuffled[number[its]]
        ids: Int64s = self._sorted[number * self._batch + within]
        return ids


class Curriculum:
    """Draws from the easiest tenth of the samples in the first epoch, and from a tenth more in each further one.

    Args:
        difficulty: of each training sample.
    """

    def __init__(self, difficulty: Sequence[float]) -> None:
        self._sorted = np.argsort(np.array(difficulty), kind="stable")

    def __call__(self, seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
        reach = np.ceil(num_samples * np.minimum(1.0, 0.1 * (epoch + 1)))
        ids: Int64s = self._sorted[(uniform(seed, epoch, place) * reach).astype(np.int64)]
        return ids
