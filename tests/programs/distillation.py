"""Distillation: a student learns from labels and from a frozen teacher."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Program, Trained, build, integers, numbers, whole_batches


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
        self.teacher.requires_grad_(False).eval()
        self.student = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(inputs), self.teacher(inputs)


def data() -> TensorDataset:
    return TensorDataset(numbers(33, 4), integers(3, 33))


def distilled(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the loss at temperature 2, summed over samples."""
    student, teacher = model(inputs)
    apart = kl_div((student / 2).log_softmax(1), (teacher / 2).log_softmax(1), reduction="sum", log_target=True)
    return 4 * 0.7 * apart + 0.3 * cross_entropy(student, labels, reduction="sum")


def plain() -> Trained:
    model, dataset, losses = build(Model), data(), []
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.01)
    for ids in whole_batches(len(dataset)):
        optimizer.zero_grad()
        loss = distilled(model, *dataset[ids]) / len(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained.of(losses, model)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(distilled(model, *batch), len(batch[0]))


PROGRAM = Program(__name__, "distillation: a frozen teacher in evaluation mode", plain)
