"""Weighted sampling: rare classes are drawn as often as others."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from steadfast import Sums
from steadfast.data.order import Int64s
from tests.programs.mixup import Model
from tests.programs.program import GLOBAL_SIZE, SEED, STEPS, Program, Trained, build, numbers

__all__ = ["Model"]
SIZE = 33


def data() -> TensorDataset:
    return TensorDataset(numbers(SIZE, 4), torch.tensor([1] * 2 + [2] * 3 + [0] * (SIZE - 5)))


@cache
def drawn(seed: int, epoch: int) -> list[int]:
    """Return the samples of an epoch, drawn with replacement."""
    labels = data().tensors[1]
    weights = 1 / labels.bincount()[labels]
    generator = torch.Generator().manual_seed(seed + epoch)
    found: list[int] = torch.multinomial(weights, SIZE, replacement=True, generator=generator).tolist()
    return found


def plain() -> Trained:
    model, dataset, losses = build(Model), data(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ids = [index for epoch in range(9) for index in drawn(SEED, epoch)]
    for step in range(STEPS):
        inputs, labels = dataset[ids[step * GLOBAL_SIZE : (step + 1) * GLOBAL_SIZE]]
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained.of(losses, model)


def order(seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
    each = zip(epoch.tolist(), place.tolist(), strict=True)
    return np.array([drawn(seed, number)[position] for number, position in each], np.int64)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        inputs, labels = batch
        return Sums(cross_entropy(model(inputs), labels, reduction="sum"), len(labels))


PROGRAM = Program(
    __name__,
    "weighted sampling, curriculum, an order of one's own",
    plain,
    words=(f"data.order={{target: '{__name__}:order'}}",),
    advice="`data.order: {target: ...}`",
)
