"""A GAN whose generator and discriminator take turns, each with an Adam of its own."""

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from steadfast import Sums
from steadfast.hooks.hook import HookContext
from tests.programs.program import Program, Trained, build, numbers, seeded_parts

LATENT = 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(LATENT, 8), nn.Tanh(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, real: Tensor, noise: Tensor, turn: str) -> Tensor:
        """Return the loss of each sample of the network whose turn it is; the other one does not learn."""
        fake = self.generator(noise)
        if turn == "discriminator":
            judged = softplus(-self.discriminator(real)) + softplus(self.discriminator(fake.detach()))
        else:
            frozen = {name: param.detach() for name, param in self.discriminator.named_parameters()}
            judged = softplus(-functional_call(self.discriminator, frozen, (fake,)))
        return torch.as_tensor(judged)[:, 0]


def data() -> TensorDataset:
    return TensorDataset(numbers(33, 2) + 1.0)


def turn_of(step: int) -> str:
    return "discriminator" if step % 2 else "generator"


def plain() -> Trained:
    model, losses = build(Model), []
    optimizers = {
        name: torch.optim.Adam(getattr(model, name).parameters(), lr=0.01) for name in ("generator", "discriminator")
    }
    for step, parts in enumerate(seeded_parts(data()), 1):
        terms = []
        for (real,) in parts:
            noise = torch.randn(len(real), LATENT, dtype=real.dtype)
            terms.append(model(real, noise, turn_of(step)))
        loss = torch.cat(terms).mean()
        optimizers[turn_of(step)].zero_grad()
        loss.backward()
        optimizers[turn_of(step)].step()
        losses.append(loss.item())
    return Trained.of(losses, model)


class Turns:
    """Hook that names the network whose turn it is in the step to come."""

    def on_start(self, run: HookContext) -> None:
        Task.turn = turn_of(run.step + 1)

    on_step = on_start


class Task:
    turn = ""

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Sums:
        (real,) = batch
        noise = torch.randn(len(real), LATENT, dtype=real.dtype)
        return Sums(model(real, noise, Task.turn).sum(), len(real))


PROGRAM = Program(
    __name__,
    "GAN whose networks take turns",
    plain,
    words=(f"hooks=[{{target: '{__name__}:Turns'}}]",),
    advice="one Adam for both networks does as two: it leaves alone what a step does not use. A hook names the turn",
)
