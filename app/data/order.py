"""Which sample stands at which position: a pure function of the seed, in O(1) memory and without any state.

Training positions are one endless stream; position p belongs to epoch p // num_train. Every epoch is a fresh
keyed permutation, so each sample comes once an epoch whoever reads it, and a run resumes from one integer.
"""

import functools
import math

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
UInt64s = NDArray[np.uint64]

_WORD = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6
_SPLIT, _EPOCH, _DIGEST = range(3)  # keys of different purposes never coincide


class Permutation:
    """A keyed bijection on range(size): the generalised Feistel network of Black and Rogaway (2002).

    An index is a cell of a grid with sides about the root of size, which exceeds range(size) by less than a
    row: a result rarely falls outside, and is then permuted again until it is inside (cycle walking). With
    sides that are powers of two, three of four may fall outside, which makes a short call ten times as long.
    """

    def __init__(self, size: int, key: UInt64s) -> None:
        """`key` is one for all indices, shape (1,), or one for each index of the calls to come."""
        self.size = size
        columns = math.isqrt(max(size - 1, 0)) + 1  # the root, rounded up: three samples need a 2 x 2 grid
        self._grid = (np.uint64(-(-size // columns)), np.uint64(columns))
        self._key = key

    def __call__(self, index: Int64s) -> Int64s:
        """Where each index, in range(size), goes. Same shape."""
        place = self._network(index.astype(np.uint64), self._key)
        while (outside := place >= self.size).any():
            key = self._key if len(self._key) == 1 else self._key[outside]
            place[outside] = self._network(place[outside], key)
        return place.astype(np.int64)

    def _network(self, place: UInt64s, key: UInt64s) -> UInt64s:
        rows, columns = self._grid
        left, right = np.divmod(place, columns)
        for _ in range(_ROUNDS // 2):
            # A 63-bit round value cannot overflow when a half is added, and leaves no bias worth the name.
            key = key + _GOLDEN
            left = (left + (_mix(right ^ key) >> np.uint64(1))) % rows
            key = key + _GOLDEN
            right = (right + (_mix(left ^ key) >> np.uint64(1))) % columns
        return left * columns + right


class SampleOrder:
    """The split into training and validation samples, and the order of each."""

    def __init__(self, num_samples: int, validation_fraction: float, seed: int) -> None:
        wanted = max(1, round(num_samples * validation_fraction)) if validation_fraction > 0 else 0
        self.num_validation = min(wanted, num_samples - 1)
        self.num_train = num_samples - self.num_validation
        self._split = Permutation(num_samples, _key(_SPLIT, seed))
        self._epochs = _key(_EPOCH, seed)

    def train(self, positions: Int64s) -> Int64s:
        """The sample ids at positions of the endless training stream; a call may span epochs."""
        epoch, place = np.divmod(positions, self.num_train)
        keys = _mix(self._epochs + epoch.astype(np.uint64) * _GOLDEN)
        return self._split(Permutation(self.num_train, keys)(place))

    def validation(self, positions: Int64s) -> Int64s:
        """The sample ids at positions of the validation stream: one fixed order, again and again."""
        assert self.num_validation, "no samples are held out"
        return self._split(self.num_train + positions % self.num_validation)


def sample_keys(ids: Int64s, positions: Int64s, seed: int) -> UInt64s:
    """A keyed hash of each (id, position): what the digest sums, and what seeds the sample's augmentation."""
    return _mix(_mix(ids.astype(np.uint64) + _key(_DIGEST, seed)) + positions.astype(np.uint64) * _GOLDEN)


def samples_digest(ids: Int64s, positions: Int64s, seed: int) -> int:
    """The sum mod 2^64 of the samples' hashes: the same in any grouping, another if one is lost, repeated or
    swapped."""
    return int(sample_keys(ids, positions, seed).sum())


@functools.cache
def _key(*words: int) -> UInt64s:
    key = np.zeros(1, np.uint64)  # an array, since numpy warns of overflow in scalars only
    for word in words:
        key = _mix(key + np.uint64(word & _WORD) + _GOLDEN)
    return key


def _mix(word: UInt64s) -> UInt64s:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection; every bit reaches every bit."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
