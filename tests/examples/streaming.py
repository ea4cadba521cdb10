"""Shards of MosaicML's Streaming as data of one's own: `data: {target: "tests.examples.streaming:Shards"}`.

Their StreamingDataset orders and partitions samples by rank, and continues from a state of its own. Here both follow
from the step, so the port is random access: their LocalDataset, which reads a sample of a shard by its index.
"""

from typing import Any

import numpy as np
import torch

import tests.examples.operators  # noqa: F401 - Streaming imports torchvision

from streaming import LocalDataset  # isort: skip


class Shards(LocalDataset):
    """MDS shards in a folder that every node sees; numbers and arrays come as tensors, whatever else as it is.

    Shards that were written with a compression have to be decompressed before, which Streaming does as it downloads.
    """

    def __init__(self, local: str, split: str | None = None) -> None:
        super().__init__(local, split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.get_item(index)
        return {name: _as_tensor(value) for name, value in sample.items()}


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.number | int | float):
        return torch.as_tensor(np.array(value))  # a copy: what a shard holds may be read only
    return value
