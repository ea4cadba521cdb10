"""The critic of a WGAN-GP: the gradient of its output is a part of the loss, so backward runs through a backward."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Parts, Program, Trained, build, numbers, optimized_by, seeded_parts, train


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
        """Return the loss of each sample, (samples,)."""
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square()
        return torch.as_tensor((self.critic(fake) - self.critic(real))[:, 0] + 10 * penalty)


def data() -> TensorDataset:
    return TensorDataset(numbers(33, 2, seed=1), numbers(33, 2, seed=2) + 1.0)


def plain() -> Trained:
    model = build(Model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)

    def loss(parts: Parts) -> Tensor:
        found = [model(real, fake, torch.rand(len(real), 1, dtype=real.dtype)) for real, fake in parts]
        return torch.cat(found).mean()

    return train(model, seeded_parts(data()), loss, optimizer)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        real, fake = batch
        return Sums(model(real, fake, torch.rand(len(real), 1, dtype=real.dtype)).sum(), len(real))


PROGRAM = Program(
    __name__,
    "gradient penalty with double backward (WGAN-GP)",
    plain,
    words=(optimized_by("torch.optim:RMSprop"),),
)
