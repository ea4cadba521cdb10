"""A quantizer with a custom autograd function: a straight-through estimator."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Program, Trained, build, numbers, train, whole_batches


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return (2 * inputs).round() / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        return torch.where(inputs.abs() < 2, gradient, 0.0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.decoder(Rounded.apply(self.encoder(inputs))))  # type: ignore[no-untyped-call]


def data() -> TensorDataset:
    return TensorDataset(numbers(33, 4))


def plain() -> Trained:
    model = build(Model)
    return train(model, whole_batches(data()), lambda batch: (model(batch[0]) - batch[0]).square().sum(1).mean())


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Sums:
        (inputs,) = batch
        return Sums((model(inputs) - inputs).square().sum(), len(inputs))


PROGRAM = Program(__name__, "custom `autograd.Function`", plain)
