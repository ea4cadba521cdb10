"""Samples of several sources in turn, by their weights."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Turns:
    """Endless sequence of sources, in which each source comes as often as its weight says.

    Of the first n places each source has its share of n, less than one place more or less. The sequence repeats after
    `sum(weights)` places. The method is Tijdeman's for the chairman assignment problem (1980).

    Args:
        weights: a positive integer for each source.

    Attributes:
        weights: as given.
        period: sum of the weights.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self.period = sum(weights)
        self._sources = _sequence(np.array(weights, np.int64))
        self._ranks = np.empty(self.period, np.int64)  # for each place: how often its source has come before
        self._places = []  # for each source: its places in a period
        for source, weight in enumerate(weights):
            places = np.flatnonzero(self._sources == source)
            self._ranks[places] = np.arange(weight)
            self._places.append(places)
        self._weights = np.array(weights, np.int64)

    def __call__(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Return the source of each position, and the number of earlier turns of this source."""
        repeat, place = np.divmod(positions, self.period)
        sources = self._sources[place]
        return sources, repeat * self._weights[sources] + self._ranks[place]

    def position(self, source: int, turn: int) -> int:
        """Return the position of a source's turn; turns count from 0."""
        repeat, rank = divmod(turn, self.weights[source])
        return repeat * self.period + int(self._places[source][rank])


def _sequence(weights: Int64s) -> Int64s:
    """Return the source of each place of a period."""
    num_sources = len(weights)
    period = int(weights.sum())
    if num_sources == 1:
        return np.zeros(period, np.int64)
    # All numbers are multiplied by `period * spread`, so that they are integers.
    spread = 2 * num_sources - 2
    behind = np.zeros(num_sources, np.int64)  # how much each source lags behind its share
    found = np.empty(period, np.int64)
    for place in range(period):
        behind += weights * spread
        # A source that lags enough may come. Of these the one comes whose lag would be too large first.
        left = np.where(behind >= period, (period * (spread - 1) - behind) / weights, np.inf)
        source = int(left.argmin())
        behind[source] -= period * spread
        found[place] = source
    return found


class Mixture:
    """Dataset of several sources, one after another.

    Attributes:
        sources: the sources' datasets.
        counts_vary: as in `Dataset`.
        is_augmented: as in `Dataset`.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        self.sources = sources
        self._starts = [0, *accumulate(map(len, sources))]
        units = {getattr(source, "units_per_sample", 1) for source in sources}
        self.counts_vary = len(units) > 1 or any(getattr(source, "counts_vary", True) for source in sources)
        self.is_augmented = any(getattr(source, "is_augmented", True) for source in sources)
        if len(units) == 1:
            (self.units_per_sample,) = units
        if any(hasattr(source, "set_epoch") for source in sources):
            self.set_epoch = self._set_epoch

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int, /) -> Any:
        number = bisect_right(self._starts, index) - 1
        return self.sources[number][index - self._starts[number]]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples."""
        samples: list[Any] = [None] * len(indices)
        numbers = [bisect_right(self._starts, index) - 1 for index in indices]
        for number, source in enumerate(self.sources):
            places = [place for place, its in enumerate(numbers) if its == number]
            within = [indices[place] - self._starts[number] for place in places]
            found = _several(source, within) if places else []
            for place, sample in zip(places, found, strict=True):
                samples[place] = sample
        return samples

    def without_augmentation(self) -> "Mixture":
        return Mixture([_plain(source) for source in self.sources])

    def _set_epoch(self, epoch: int) -> None:
        for source in _having(self.sources, "set_epoch"):
            source.set_epoch(epoch)


def _several(source: Any, indices: list[int]) -> Iterable[Any]:
    return source.__getitems__(indices) if hasattr(source, "__getitems__") else map(source.__getitem__, indices)


def _having(sources: Iterable[Any], name: str) -> list[Any]:
    return [source for source in sources if hasattr(source, name)]


def _plain(source: Any) -> Any:
    return source.without_augmentation() if hasattr(source, "without_augmentation") else source
