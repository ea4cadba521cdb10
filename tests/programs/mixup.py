"""Mixup in the loss, by draws of numpy as timm's has them."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import (
    GLOBAL_SIZE,
    Parts,
    Program,
    Trained,
    build,
    integers,
    numbers,
    optimized_by,
    seeded_parts,
    train,
)


def Model() -> nn.Module:  # noqa: N802
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> TensorDataset:
    return TensorDataset(numbers(33, 4), integers(3, 33))


def mixed(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the batch mixed with itself in another order, summed over samples."""
    share = np.random.beta(0.4, 0.4)
    others = np.random.permutation(len(inputs))
    logits = model(share * inputs + (1 - share) * inputs[others])
    own = cross_entropy(logits, labels, reduction="sum")
    return share * own + (1 - share) * cross_entropy(logits, labels[others], reduction="sum")


def plain() -> Trained:
    model = build(Model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(parts: Parts) -> Tensor:
        return torch.stack([mixed(model, *batch) for batch in parts]).sum() / GLOBAL_SIZE

    return train(model, seeded_parts(data()), loss, optimizer)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(mixed(model, *batch), len(batch[0]))


PROGRAM = Program(
    __name__,
    "mixup in the loss, by draws of numpy",
    plain,
    words=("task.coupled=true", optimized_by("torch.optim:SGD", 0.1, momentum=0.9)),
    advice="`task.coupled: true`",
)
