"""A denoising diffusion model, whose loss draws a time and noise for each sample."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Parts, Program, Trained, build, numbers, optimized_by, seeded_parts, train

TIMES = 20
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.2, TIMES, dtype=torch.float64), 0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(TIMES, 8)
        self.inner, self.outer = nn.Linear(2, 8), nn.Linear(8, 2)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        return torch.as_tensor(self.outer(torch.tanh(self.inner(noisy) + self.time(time))))


def data() -> TensorDataset:
    return TensorDataset(numbers(33, 2))


def errors(model: nn.Module, clean: Tensor) -> Tensor:
    """Return the squared error of the noise that the model finds in each sample."""
    time = torch.randint(TIMES, (len(clean),))
    noise = torch.randn_like(clean)
    share = KEPT[time][:, None]
    noisy = share.sqrt() * clean + (1 - share).sqrt() * noise
    return torch.as_tensor((model(noisy, time) - noise).square().mean(1))


def plain() -> Trained:
    model = build(Model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss(parts: Parts) -> Tensor:
        return torch.cat([errors(model, *batch) for batch in parts]).mean()

    return train(model, seeded_parts(data()), loss, optimizer)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Sums:
        return Sums(errors(model, *batch).sum(), len(batch[0]))


PROGRAM = Program(
    __name__, "diffusion: the loss draws times and noise", plain, words=(optimized_by("torch.optim:AdamW"),)
)
