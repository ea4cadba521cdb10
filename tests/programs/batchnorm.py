"""A network with BatchNorm and dropout, whose statistics and draws are those of a microbatch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Program, Trained, batches, build, integers, numbers, optimized_by, seed_loss

SIZE, PART = 12, 4  # of a global batch and of a microbatch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.outer(self.dropout(torch.relu(self.norm(self.inner(inputs))))))


def data() -> TensorDataset:
    return TensorDataset(numbers(33, 4), integers(3, 33))


def plain() -> Trained:
    model, dataset, losses = build(Model), data(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, microbatches in batches(len(dataset), SIZE, PART):
        optimizer.zero_grad()
        total = 0.0
        for index, ids in enumerate(microbatches):
            inputs, labels = dataset[ids]
            seed_loss(step, index)
            loss = cross_entropy(model(inputs), labels) / len(microbatches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return Trained.of(losses, model)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        inputs, labels = batch
        return Sums(cross_entropy(model(inputs), labels, reduction="sum"), len(labels))


PROGRAM = Program(
    __name__,
    "BatchNorm and dropout",
    plain,
    words=(f"batch={{global_size: {SIZE}, microbatch_size: {PART}}}", optimized_by("torch.optim:SGD", 0.1)),
    advice="statistics and draws are those of a microbatch, as of a loop that accumulates gradients",
)
