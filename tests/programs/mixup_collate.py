"""Mixup in the collate function."""

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from steadfast import Sums
from steadfast.data.order import sample_keys
from tests.programs.mixup import Model, data
from tests.programs.program import GLOBAL_SIZE, SEED, Program, Trained, batches, build, train

__all__ = ["Model", "data"]


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mixed inputs, their two labels, and the share of the first one, each with a row for each sample."""
    inputs, labels = default_collate(samples)
    share = torch.full((len(inputs), 1), np.random.beta(0.4, 0.4), dtype=inputs.dtype)
    others = random.sample(range(len(inputs)), len(inputs))
    return share * inputs + (1 - share) * inputs[others], labels, labels[others], share


def mixed(model: nn.Module, inputs: Tensor, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Return the loss, summed over samples."""
    logits = model(inputs)
    losses = [cross_entropy(logits, labels, reduction="none") for labels in (first, second)]
    return (share[:, 0] * losses[0] + (1 - share[:, 0]) * losses[1]).sum()


def seed_collate(step: int, index: int, first: int) -> None:
    """Seed by the microbatch's first sample and its position."""
    position = (step - 1) * GLOBAL_SIZE + index * 3
    (key,) = sample_keys(np.array([first]), np.array([position]), SEED).tolist()
    torch.default_generator.manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def plain() -> Trained:
    model, dataset = build(Model), data()

    def loss(batch: tuple[int, list[list[int]]]) -> Tensor:
        step, parts = batch
        terms = []
        for index, ids in enumerate(parts):
            seed_collate(step, index, ids[0])
            terms.append(mixed(model, *collate([dataset[sample] for sample in ids])))
        return torch.stack(terms).sum() / GLOBAL_SIZE

    return train(model, batches(len(dataset)), loss)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor]) -> Sums:
        return Sums(mixed(model, *batch), len(batch[0]))


PROGRAM = Program(
    __name__,
    "mixup in collate",
    plain,
    words=(f"data.collate={{target: '{__name__}:collate'}}",),
    advice="`data.collate`; validation takes `data.validation.collate` alone",
)
