"""A loss that calls a method of the model beside its forward."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from steadfast import Sums
from tests.programs import part_of_model
from tests.programs.nadam import data
from tests.programs.program import Program, Trained, build, train, whole_batches

__all__ = ["data"]


class Model(part_of_model.Model):
    def judge(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.value(torch.sin(self.policy(inputs))))


def squared(model: nn.Module, inputs: Tensor, wanted: Tensor) -> Tensor:
    """Return the squared error, summed over samples."""
    return mse_loss(model.judge(inputs), wanted, reduction="sum")  # type: ignore[operator]


def plain() -> Trained:
    model = build(Model)
    return train(model, whole_batches(data()), lambda batch: squared(model, *batch) / len(batch[0]))


class Task:
    model_methods = ("judge",)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(squared(model, *batch), len(batch[0]))


PROGRAM = Program(
    __name__, "loss that calls methods of the model", plain, advice='`model_methods = ["judge"]` in the task'
)
