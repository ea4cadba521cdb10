"""A variational autoencoder, whose forward draws a latent for each sample."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import GLOBAL_SIZE, Parts, Program, Trained, build, numbers, seeded_parts, train


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(images).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(latent), mean, log_variance


def data() -> TensorDataset:
    return TensorDataset((numbers(33, 6) > 0).double())


def bound(model: nn.Module, images: Tensor) -> Tensor:
    """Return the negative evidence lower bound, summed over samples."""
    decoded, mean, log_variance = model(images)
    apart: Tensor = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return apart + binary_cross_entropy_with_logits(decoded, images, reduction="sum")


def plain() -> Trained:
    model = build(Model)

    def loss(parts: Parts) -> Tensor:
        return torch.stack([bound(model, *batch) for batch in parts]).sum() / GLOBAL_SIZE

    return train(model, seeded_parts(data()), loss)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Sums:
        return Sums(bound(model, *batch), len(batch[0]))


PROGRAM = Program(__name__, "VAE: the model draws latents", plain)
