"""Map positions in the data to samples.

The map is a pure function of the seed, in O(1) memory and without state. Training positions are one endless stream, in
which position p belongs to epoch p // num_train, so a run resumes from one integer. By default every epoch is another
keyed permutation, so each sample comes once per epoch, on any worker. `data.order` names another pure function.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from steadfast.config import DataConfig, MixtureData, Target
from steadfast.config.target import build_function
from steadfast.data.mixture import Turns
from steadfast.errors import DataError

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
UInt64s = NDArray[np.uint64]

_WORD_MASK = (1 << 64) - 1
# Increment of splitmix64: 2^64 divided by the golden ratio, made odd.
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 6

# First word of a key. Keys of different purposes begin with different words, so they never coincide.
_SPLIT = 0
_EPOCH = 1
_DIGEST = 2
_DRAW = 3
_SOURCE = 4
_BLOCK = 5
_WINDOW = 6

WINDOW_BLOCKS = 16  # neighbouring blocks whose samples are shuffled together

_NUM_TRIED = 256  # positions at which an order of the user's own is tested


@dataclass(frozen=True, eq=False)
class Extent:
    """Number of samples of a dataset, and their groups.

    Attributes:
        num_samples: held-out samples included.
        blocks: id of the first sample of each block of neighbouring samples that are read together.
        sources: extents of the sources of a mixture.
    """

    num_samples: int
    blocks: Int64s | None = None
    sources: "tuple[Extent, ...]" = ()

    @classmethod
    def of(cls, dataset: Any) -> Self:
        """Return the extent of a dataset."""
        sources = tuple(map(cls.of, getattr(dataset, "sources", ())))
        return cls(len(dataset), getattr(dataset, "blocks", None), sources)


class Order(Protocol):
    """Order of the user's own: the sample at each position of an epoch.

    The function must be pure, element by element: a result depends on the values at its own index alone, and not on the
    number of positions in the call, on earlier calls, on the worker or on the time. Every worker and loader process
    calls the function for the positions that it reads next, also after a resume, and `audit` calls it again for all
    positions.

    The function may return a sample several times and another sample never, as draws with replacement do. An epoch has
    as many positions as there are training samples. `uniform` draws random numbers keyed by position.

    A rule about whole batches (buckets of equal lengths, a curriculum by step) also follows from the position: with
    position = epoch * num_samples + place, the step is position // batch.global_size + 1, unless a run counted in
    epochs was extended. This does not hold for a source of a mixture.
    """

    def __call__(self, seed: int, epoch: Int64s, place: Int64s, num_samples: int, /) -> Int64s:
        """Return the samples to read.

        Args:
            seed: `run.seed`; of a source of a mixture, a number of 64 bits that follows from it.
            epoch: int64 (n,), from 0. Neighbours may belong to different epochs.
            place: int64 (n,), in range(num_samples): the position within the epoch.
            num_samples: number of training samples. Held-out samples follow them in the dataset.

        Returns:
            Integers (n,) in range(num_samples).
        """
        ...


class Permutation:
    """Keyed permutation of range(size).

    The method is the generalised Feistel network of Black and Rogaway (2002).
    """

    def __init__(self, size: int, key: UInt64s) -> None:
        """Permute range(size) by `key`.

        `key` has shape (1,), or one key for each index of the calls that follow.
        """
        self.size = size
        self._key = key
        # An index is a cell of a grid that exceeds range(size) by less than a row, so a result rarely lies outside of
        # range(size). Feistel halves are usually powers of two, but then up to three of four results would lie outside,
        # which would make a short call ten times as long.
        columns = math.isqrt(max(size - 1, 0)) + 1  # square root, rounded up: three samples need a 2 x 2 grid
        rows = -(-size // columns)
        self._grid = (np.uint64(rows), np.uint64(columns))

    def __call__(self, index: Int64s) -> Int64s:
        """Return the permuted index of each index in range(size), in the same shape."""
        # Cycle walking: a result outside of range(size) is permuted again. The loop ends, because a cycle of the grid's
        # permutation that starts inside range(size) returns to range(size).
        place = self._network(index.astype(np.uint64), self._key)
        while True:
            outside = place >= self.size
            if not outside.any():
                return place.astype(np.int64)
            key = self._key if len(self._key) == 1 else self._key[outside]
            place[outside] = self._network(place[outside], key)

    def _network(self, place: UInt64s, key: UInt64s) -> UInt64s:
        rows, columns = self._grid
        left, right = np.divmod(place, columns)
        for _ in range(_ROUNDS // 2):
            # A 63-bit round value cannot overflow when a half is added, and its bias is negligible.
            key = key + _GOLDEN_GAMMA
            left = (left + (_mix(right ^ key) >> np.uint64(1))) % rows
            key = key + _GOLDEN_GAMMA
            right = (right + (_mix(left ^ key) >> np.uint64(1))) % columns
        return left * columns + right


class SampleOrder:
    """Split into training and validation samples, with the order of each."""

    def __init__(self, num_samples: int, validation_fraction: float, seed: int) -> None:
        self.seed = seed
        num_validation = 0
        if validation_fraction > 0:
            num_validation = max(1, round(num_samples * validation_fraction))
        self.num_validation = min(num_validation, num_samples - 1)  # leaves at least one sample for training
        self.num_train = num_samples - self.num_validation
        # The first num_train places of one permutation of all samples are for training, the same in every epoch.
        self._split = Permutation(num_samples, _key(_SPLIT, seed))
        self._epochs = _key(_EPOCH, seed)

    def train(self, positions: Int64s) -> Int64s:
        """Return the sample ids at positions of the training stream.

        The positions of a call may belong to several epochs.
        """
        epoch, place = np.divmod(positions, self.num_train)
        # Each position has its own key, because neighbours may belong to different epochs.
        keys = _mix(self._epochs + epoch.astype(np.uint64) * _GOLDEN_GAMMA)
        return self._split(Permutation(self.num_train, keys)(place))

    def validation(self, positions: Int64s) -> Int64s:
        """Return the sample ids at positions of the validation stream.

        The stream repeats one fixed order.
        """
        assert self.num_validation, "no samples are held out"
        return self._split(self.num_train + positions % self.num_validation)


class LastHeldOut(SampleOrder):
    """Order that holds out the last samples of the dataset."""

    def validation(self, positions: Int64s) -> Int64s:
        assert self.num_validation, "no samples are held out"
        return self.num_train + positions % self.num_validation


class OwnOrder(LastHeldOut):
    """Order given by a function."""

    def __init__(self, num_samples: int, validation_fraction: float, seed: int, order: Order, name: str) -> None:
        """Test `order` and build the order.

        `name` is the configuration key and the order's name, for errors. Raises DataError if the order cannot be used.
        """
        super().__init__(num_samples, validation_fraction, seed)
        self._order = order
        self._name = name
        self._try_out()

    def train(self, positions: Int64s) -> Int64s:
        epoch, place = np.divmod(positions, self.num_train)
        ids = np.asarray(self._order(self.seed, epoch, place, self.num_train))
        if ids.shape != positions.shape or ids.dtype.kind not in "iu":
            self._refuse(
                f"returned {ids.dtype} {ids.shape} for {len(positions)} positions; expected int64 {positions.shape}"
            )
        wrong = (ids < 0) | (ids >= self.num_train)
        if wrong.any():
            first = int(wrong.argmax())
            where = f"at place {place[first]} of epoch {epoch[first]}"
            self._refuse(f"returned sample {ids[first]} {where}; training samples are 0 to {self.num_train - 1}")
        return ids.astype(np.int64, copy=False)

    def _try_out(self) -> None:
        """Check that the order is a pure function, element by element."""
        # Around the end of an epoch the test also finds an order that takes all positions of a call for one epoch.
        positions = np.arange(max(0, self.num_train - _NUM_TRIED // 2), self.num_train + _NUM_TRIED // 2)
        found = self.train(positions)
        # The second time the parts come in the other order, in which a function with a memory returns other samples.
        half = len(positions) // 2
        parts = np.concatenate([self.train(positions[half:]), self.train(positions[:half])])
        differ = np.flatnonzero(np.roll(parts, half) != found)
        if len(differ):
            epoch, place = divmod(int(positions[differ[0]]), self.num_train)
            self._refuse(
                f"returns another sample at place {place} of epoch {epoch} when it is called again, or for fewer "
                "positions at once. The order must be a pure function of each seed, epoch and place; "
                "steadfast.data.order.uniform draws such random numbers"
            )

    def _refuse(self, what: str) -> NoReturn:
        raise DataError(f"{self._name} {what}")


class BlockOrder(LastHeldOut):
    """Order that reads neighbouring samples at about the same time.

    In each epoch the blocks come in another keyed order, and the samples of each 16 blocks in a row are shuffled.
    """

    def __init__(self, blocks: Int64s, num_samples: int, validation_fraction: float, seed: int) -> None:
        super().__init__(num_samples, validation_fraction, seed)
        self._starts = blocks[blocks < self.num_train]
        self._sizes = np.diff(self._starts, append=self.num_train)
        self._epoch: tuple[int, _ShuffledBlocks] | None = None

    def train(self, positions: Int64s) -> Int64s:
        epochs, places = np.divmod(positions, self.num_train)
        ids = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            its = epochs == epoch
            ids[its] = self._shuffled(epoch)(places[its])
        return ids

    def _shuffled(self, epoch: int) -> "_ShuffledBlocks":
        # To order many blocks takes milliseconds, so the order of one epoch is kept.
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, _ShuffledBlocks(self._starts, self._sizes, keyed_hash(_BLOCK, self.seed, epoch))
        return self._epoch[1]


class _ShuffledBlocks:
    """One epoch of a `BlockOrder`."""

    def __init__(self, starts: Int64s, sizes: Int64s, key: int) -> None:
        self._key = key
        numbers = np.arange(len(starts)).astype(np.uint64)
        chosen = np.argsort(_mix(numbers * _GOLDEN_GAMMA + np.uint64(key)), kind="stable")
        self._starts = starts[chosen]
        self._ends = np.cumsum(sizes[chosen])  # places at which the blocks end
        self._begins = self._ends - sizes[chosen]
        last = np.minimum(np.arange(0, len(chosen), WINDOW_BLOCKS) + WINDOW_BLOCKS, len(chosen)) - 1
        self._window_ends = self._ends[last]

    def __call__(self, places: Int64s) -> Int64s:
        """Return the sample of each place of the epoch."""
        windows = np.searchsorted(self._window_ends, places, side="right")
        shuffled = np.empty_like(places)
        for window in np.unique(windows).tolist():
            its = windows == window
            begin = int(self._window_ends[window - 1]) if window else 0
            # A run has many windows, and `_key` would keep the key of each.
            key = np.array([keyed_hash(_WINDOW, self._key, window)], np.uint64)
            permute = Permutation(int(self._window_ends[window]) - begin, key)
            shuffled[its] = begin + permute(places[its] - begin)
        blocks = np.searchsorted(self._ends, shuffled, side="right")
        return self._starts[blocks] + shuffled - self._begins[blocks]


class MixtureOrder(SampleOrder):
    """Order of the samples of several sources.

    The sources take turns by their weights. Each source has an order of its own, with held-out samples of its own.

    Args:
        parts: the order of each source. The samples of the sources follow each other in the dataset.
        weights: a positive integer for each source.

    Attributes:
        turns: the sequence of the sources.
        starts: the id of each source's first sample.
    """

    def __init__(self, parts: Sequence[SampleOrder], weights: Sequence[int], seed: int) -> None:
        self.seed = seed
        self.turns = Turns(weights)
        self.parts = parts
        sizes = [part.num_train + part.num_validation for part in parts]
        self.starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self.num_train = sum(part.num_train for part in parts)
        self.num_validation = sum(part.num_validation for part in parts)

    def train(self, positions: Int64s) -> Int64s:
        sources, turns = self.turns(positions)
        ids = np.empty_like(positions)
        for number, part in enumerate(self.parts):
            its = sources == number
            if its.any():  # a function of the user may not take an empty array
                ids[its] = self.starts[number] + part.train(turns[its])
        return ids

    def validation(self, positions: Int64s) -> Int64s:
        assert self.num_validation, "no samples are held out"
        places = positions % self.num_validation
        ids = np.empty_like(positions)
        before = 0
        for start, part in zip(self.starts, self.parts, strict=True):
            its = (places >= before) & (places < before + part.num_validation)
            if its.any():
                ids[its] = start + part.validation(places[its] - before)
            before += part.num_validation
        return ids


def build_order(config: DataConfig, extent: Extent | int, seed: int) -> SampleOrder:
    """Build the order of a dataset.

    Args:
        extent: of the dataset. A number of samples is enough unless the data are shards or a mixture.

    Raises:
        ConfigError: the target of an order cannot be loaded.
        DataError: the target is not a valid order.
    """
    if isinstance(extent, int):
        extent = Extent(extent)
    fraction = config.held_out_fraction
    if not isinstance(config, MixtureData):
        return _build_order(config.order, "data.order", extent, fraction, seed)
    parts = []
    for number, (source, its) in enumerate(zip(config.sources, extent.sources, strict=True)):
        key = f"data.sources[{number}].order"
        parts.append(_build_order(source.order, key, its, fraction, keyed_hash(_SOURCE, seed, number)))
    return MixtureOrder(parts, config.integer_weights, seed)


def _build_order(order: str | Target, key: str, extent: Extent, fraction: float, seed: int) -> SampleOrder:
    """Build the order that is configured at `key`."""
    if isinstance(order, Target):
        function: Order = build_function(order, key)
        return OwnOrder(extent.num_samples, fraction, seed, function, f"{key}: {order.target}")
    if order == "sequential":
        return OwnOrder(extent.num_samples, fraction, seed, _sequential, f"{key}: sequential")
    if order == "shuffled":
        return SampleOrder(extent.num_samples, fraction, seed)
    if extent.blocks is None:
        raise DataError(f"{key}=blocks: the dataset has no blocks, see steadfast.data.datasets.Dataset")
    return BlockOrder(extent.blocks, extent.num_samples, fraction, seed)


def _sequential(seed: int, epoch: Int64s, place: Int64s, num_samples: int, /) -> Int64s:
    return place


def uniform(seed: int, epoch: Int64s, place: Int64s) -> Float64s:
    """Return random numbers in [0, 1), for an `Order`.

    The numbers are float64 (n,), keyed by seed, epoch and place.
    """
    key = _mix(_mix(epoch.astype(np.uint64) + _key(_DRAW, seed)) + place.astype(np.uint64) * _GOLDEN_GAMMA)
    # With 52 bits instead of 53, the largest number times any total is less than the total even after rounding.
    return (key >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample_keys(ids: Int64s, positions: Int64s, seed: int) -> UInt64s:
    """Return a keyed hash of each (id, position).

    The digest is the sum of the hashes mod 2^64, which does not depend on the grouping into microbatches. Each hash
    seeds the augmentation of its sample.
    """
    # The hash includes the position, so that a sample is augmented differently in every epoch, and so that the digest
    # changes if two samples swap places.
    return _mix(_mix(ids.astype(np.uint64) + _key(_DIGEST, seed)) + positions.astype(np.uint64) * _GOLDEN_GAMMA)


def keyed_hash(*words: int) -> int:
    """Return a 64-bit hash of integers that is the same on every machine."""
    # Python does not promise that its own hash stays the same in another version.
    key = 0
    for word in words:
        key = (key + word + int(_GOLDEN_GAMMA)) & _WORD_MASK
        # This is the finaliser of `_mix` in Python's integers, because numpy takes ten times as long for one number.
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _WORD_MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _WORD_MASK
        key ^= key >> 31
    return key


@functools.cache
def _key(*words: int) -> UInt64s:
    return np.array([keyed_hash(*words)], np.uint64)  # an array, because numpy warns of overflow in scalars only


def _mix(word: UInt64s) -> UInt64s:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood, 2014).

    The function is a bijection, in which every input bit affects every output bit.
    """
    # Changing a constant changes the order of samples, so no checkpoint could be resumed. A test freezes the constants.
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
