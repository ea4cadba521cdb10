"""Model, dataset and task of train.yaml: change or replace each of them."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from steadfast import Sums

NUM_ARMS = 3


class Model(nn.Module):
    """Small network that finds the arm of a point. Any nn.Module will do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, NUM_ARMS)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Return logits: (microbatch, 2) -> (microbatch, arms)."""
        logits: Tensor = self.layers(points)
        return logits


class Spirals:
    """Dataset of points on the arms of a spiral, in place of your own data.

    A dataset has a length and returns one sample for an index: tensors, arrays and numbers in tuples or dictionaries.
    Each worker constructs the dataset, so all of them must construct the same samples.
    """

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._arms = torch.arange(num_samples) % NUM_ARMS
        radius = torch.rand(num_samples, generator=generator)
        noise = 0.1 * torch.randn(num_samples, generator=generator)
        angle = 5 * radius + 2 * math.pi * self._arms / NUM_ARMS + noise
        self._points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)

    def __len__(self) -> int:
        return len(self._arms)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._points[index], self._arms[index]


class Task:
    """Loss and metrics of a batch."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        """Return sums over the batch, not means.

        Every sum is divided once, by the count of the whole global batch, so the result does not depend on the number
        of workers.
        """
        points, arms = batch
        logits = model(points)
        correct = (logits.argmax(dim=1) == arms).sum()
        return Sums(cross_entropy(logits, arms, reduction="sum"), len(arms), {"accuracy": correct})
