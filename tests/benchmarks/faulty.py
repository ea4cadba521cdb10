"""User code that fails on request: a loss and a dataset that fail on rank 1 as a file says."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadfast.data.batches import Batch
from steadfast.tasks import LanguageModeling, Sums

CONTEXT = 32


def fail(part: str, mark: str) -> None:
    """Fail as the file says if it exists, says so of this part, and this is rank 1. The file is removed first."""
    if not os.path.exists(mark) or dist.get_rank() != 1:
        return
    struck, act = Path(mark).read_text().split()
    if struck != part:
        return
    os.unlink(mark)
    match act:
        case "raise":
            raise ValueError(f"a bug in the {part}")
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(1e6)


class Loss(LanguageModeling):
    def __init__(self, mark: str) -> None:
        super().__init__()
        self._mark = mark

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        fail("loss", self._mark)
        return super().loss(model, batch)


class Samples:
    """Random bytes."""

    units_per_sample = CONTEXT

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._bytes = torch.randint(256, (4000, CONTEXT + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        fail("dataset", self._mark)
        return self._bytes[index, :-1], self._bytes[index, 1:]
