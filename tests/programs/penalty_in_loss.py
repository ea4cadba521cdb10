"""A gradient penalty that the loss takes of the model from outside."""

import torch
from torch import Tensor, nn

from steadfast import Sums
from tests.programs.gradient_penalty import data
from tests.programs.program import Program, Trained, build, train, whole_batches

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
    model = build(Model)
    return train(model, whole_batches(data()), lambda batch: critic_loss(model, *batch) / len(batch[0]))


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(critic_loss(model, *batch), len(batch[0]))


PROGRAM = Program(__name__, "gradient penalty taken by the loss (R1)", plain)
