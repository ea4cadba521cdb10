"""Loaders over small datasets, and the microbatches that such a loader reads."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from steadfast.config import TargetData
from steadfast.data.loader import Loader
from steadfast.data.order import SampleOrder, build_order
from steadfast.plan import Microbatch

CPU = torch.device("cpu")


class Noisy:
    """Fifty samples with augmentation from all three generators that user code draws from."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return torch.tensor([float(index), torch.rand(()), random.random(), np.random.rand()]), index


class Odd(Noisy):
    """Sample 7 is of another shape, or whatever else is asked for."""

    def __init__(self, odd: Any, sample: int = 7) -> None:
        self.odd = odd
        self.sample = sample

    def __getitem__(self, index: int) -> Any:
        return self.odd if index == self.sample else (torch.zeros(2), index)


def microbatches(start: int, stop: int, size: int = 8) -> Iterator[Microbatch]:
    edges = [*range(start, stop, size), stop]
    return iter([Microbatch(0, index, a, b, 1) for index, (a, b) in enumerate(pairwise(edges))])


def loader_of(
    dataset: Any, num_workers: int = 0, validation_fraction: float = 0.1, seed: int = 1, **fields: Any
) -> Loader:
    config = TargetData(target="a:b", num_workers=num_workers, validation_fraction=validation_fraction, **fields)
    order = SampleOrder(len(dataset), validation_fraction, seed)
    if "order" in fields:
        order = build_order(config, len(dataset), seed)
    return Loader(dataset, order, config, CPU)
