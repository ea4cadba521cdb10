"""A gradient penalty that the loss takes of the model from outside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steadfast import Sums
from tests.programs.gradient_penalty import data
from tests.programs.program import Program, Trained, build, whole_batches

__all__ = ["data"]


def Model() -> nn.Module:  # noqa: N802
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def critic_loss(model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Return the loss, summed over samples, with a penalty on the slope at the real ones."""
    real = real.clone().requires_grad_()
    score = model(real)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    return torch.as_tensor((model(fake) - score).sum() + slope.square().sum())


def plain() -> Trained:
    model, dataset, losses = build(Model), data(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for ids in whole_batches(len(dataset)):
        optimizer.zero_grad()
        loss = critic_loss(model, *dataset[ids]) / len(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained.of(losses, model)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(critic_loss(model, *batch), len(batch[0]))


PROGRAM = Program(__name__, "gradient penalty taken by the loss (R1)", plain)
