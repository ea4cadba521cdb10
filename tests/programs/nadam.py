"""An optimizer whose state does not begin as zeros."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Program, Trained, build, numbers, optimized_by, train, whole_batches


def Model() -> nn.Module:  # noqa: N802
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data() -> TensorDataset:
    inputs = numbers(33, 4)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def plain() -> Trained:
    model = build(Model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    return train(model, whole_batches(data()), lambda batch: mse_loss(model(batch[0]), batch[1]), optimizer)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        inputs, wanted = batch
        return Sums(mse_loss(model(inputs), wanted, reduction="sum"), wanted.numel())


PROGRAM = Program(
    __name__, "NAdam, whose state does not begin as zeros", plain, words=(optimized_by("torch.optim:NAdam"),)
)
