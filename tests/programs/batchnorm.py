"""A network with BatchNorm and dropout, whose statistics and draws are those of a microbatch."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steadfast import Sums
from tests.programs.mixup import data
from tests.programs.program import Parts, Program, Trained, build, optimized_by, seeded_parts, train

__all__ = ["data"]
SIZE, PART = 12, 4  # of a global batch and of a microbatch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.outer(self.dropout(torch.relu(self.norm(self.inner(inputs))))))


def plain() -> Trained:
    model = build(Model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(parts: Parts) -> Tensor:
        return torch.stack([cross_entropy(model(inputs), labels) for inputs, labels in parts]).mean()

    return train(model, seeded_parts(data(), SIZE, PART), loss, optimizer)


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
