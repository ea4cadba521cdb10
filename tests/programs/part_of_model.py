"""A loss that calls a part of the model."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from steadfast import Sums
from tests.programs.nadam import data
from tests.programs.program import Program, Trained, build, train, whole_batches

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
    model = build(Model)
    return train(model, whole_batches(data()), lambda batch: squared(model, *batch) / len(batch[0]))


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
