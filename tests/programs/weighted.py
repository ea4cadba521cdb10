"""Weighted sampling: rare classes are drawn as often as others."""

from functools import cache

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from steadfast.data.order import Int64s
from tests.programs.batchnorm import Task
from tests.programs.mixup import Model
from tests.programs.program import GLOBAL_SIZE, SEED, STEPS, Program, Trained, build, numbers, train

__all__ = ["Model", "Task"]
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
    model, dataset = build(Model), data()
    ids = [index for epoch in range(9) for index in drawn(SEED, epoch)]
    steps = (dataset[ids[step * GLOBAL_SIZE : (step + 1) * GLOBAL_SIZE]] for step in range(STEPS))
    return train(model, steps, lambda batch: cross_entropy(model(batch[0]), batch[1]))


def order(seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
    each = zip(epoch.tolist(), place.tolist(), strict=True)
    return np.array([drawn(seed, number)[position] for number, position in each], np.int64)


PROGRAM = Program(
    __name__,
    "weighted sampling, curriculum, an order of one's own",
    plain,
    words=(f"data.order={{target: '{__name__}:order'}}",),
    advice="`data.order: {target: ...}`",
)
