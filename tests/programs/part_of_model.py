"""A loss that calls a part of the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from steadfast import Sums
from tests.programs.nadam import data
from tests.programs.program import Program, Trained, build, whole_batches

__all__ = ["data"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.value(torch.tanh(self.policy(inputs))))


def squared(model: nn.Module, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the squared error, summed over samples."""
    return mse_loss(model.value(torch.tanh(model.policy(inputs))), wanted, reduction="sum")  # type: ignore[operator]


def plain() -> Trained:
    model, dataset, losses = build(Model), data(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for ids in whole_batches(len(dataset)):
        optimizer.zero_grad()
        loss = squared(model, *dataset[ids]) / len(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained.of(losses, model)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(squared(model, *batch), len(batch[0]))


PROGRAM = Program(
    __name__,
    "loss that calls parts of the model",
    plain,
    refused={"fsdp": "Task.loss calls a part or a method of the model"},
    advice="under fsdp a method of the model calls its parts, and the task names it in `model_methods`",
)
