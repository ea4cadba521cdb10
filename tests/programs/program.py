"""A training program that is written twice: as a plain loop, and for Steadfast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from steadfast.config import Config, parse_config
from steadfast.data import SampleOrder
from steadfast.loop.seed import seed_generators
from steadfast.plan import Microbatch

SEED, STEPS = 1, 9
# Microbatches of 3, 3, 3 and 1 samples: neither two nor three workers share them evenly.
GLOBAL_SIZE, MICROBATCH_SIZE = 10, 3
BOTH = ("ddp", "fsdp")

Step = TypeVar("Step")  # samples of a step, in the form in which a loss takes them
Batch = tuple[Tensor, ...]
Parts = Iterator[Batch]  # microbatches of a step


class Trained(NamedTuple):
    """What a plain loop gives: the loss of each step before its update, and the weights in the end."""

    losses: list[float]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, losses: list[float], model: nn.Module) -> Trained:
        return cls(losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()})


@dataclass(frozen=True)
class Program:
    """A program of one shape.

    Its module has `Model`, `data` and `Task`, which the configuration names unless `words` say otherwise.

    Args:
        shape: how the page for users calls the program.
        plain: the plain loop; None for a program that is refused under every kind of parallelism.
        words: overrides of the configuration.
        refused: words of the line by which the program is refused, by `parallel.kind`.
        advice: what a user of a refused program does, or what an accepted one needs.
    """

    module: str
    shape: str
    plain: Callable[[], Trained] | None = None
    words: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    def config(self, storage: Path, *words: str) -> Config:
        """Return the configuration, in float64."""
        text = f"""
            run:       {{steps: {STEPS}, seed: {SEED}, report: false}}
            batch:     {{global_size: {GLOBAL_SIZE}, microbatch_size: {MICROBATCH_SIZE}}}
            model:     {{target: "{self.module}:Model"}}
            data:      {{target: "{self.module}:data", validation_fraction: 0}}
            task:      {{target: "{self.module}:Task"}}
            optimizer: {{target: "torch.optim:Adam", lr: 0.01, max_grad_norm: null}}
            schedule:  {{kind: constant}}
            precision: {{kind: fp64}}
            trackers:  []
        """
        return parse_config(text, f"{self.name}.yaml", [f"run.storage={storage}", *self.words, *words])


def optimized_by(target: str, lr: float = 0.01, **args: float) -> str:
    """Return the override that names an optimizer."""
    return f"optimizer={{target: '{target}', lr: {lr}, max_grad_norm: null, args: {args}}}"


def batches(
    num_samples: int, global_size: int = GLOBAL_SIZE, microbatch_size: int = MICROBATCH_SIZE
) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield each step, from 1, with its samples by microbatch."""
    order = SampleOrder(num_samples, 0.0, SEED)
    for step in range(1, STEPS + 1):
        ids = order.train(np.arange((step - 1) * global_size, step * global_size)).tolist()
        yield step, [ids[start : start + microbatch_size] for start in range(0, global_size, microbatch_size)]


def whole_batches(dataset: TensorDataset) -> Iterator[Batch]:
    """Yield the global batch of each step."""
    for _, microbatches in batches(len(dataset)):
        yield dataset[[index for microbatch in microbatches for index in microbatch]]


def seeded_parts(
    dataset: TensorDataset, global_size: int = GLOBAL_SIZE, microbatch_size: int = MICROBATCH_SIZE
) -> Iterator[Parts]:
    """Yield the microbatches of each step; what the loss of each draws from is seeded before it."""
    for step, microbatches in batches(len(dataset), global_size, microbatch_size):
        yield _seeded(dataset, step, microbatches)


def _seeded(dataset: TensorDataset, step: int, microbatches: list[list[int]]) -> Parts:
    for index, ids in enumerate(microbatches):
        seed_generators(SEED, Microbatch(step, index, 0, 0), torch.device("cpu"))
        yield dataset[ids]


def train(
    model: nn.Module,
    steps: Iterable[Step],
    loss_of: Callable[[Step], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    max_norm: float = math.inf,
    after_step: Callable[[], object] = lambda: None,
) -> Trained:
    """Train by a plain loop: the loss of each step, its gradients, an update by Adam or another optimizer."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        after_step()
        losses.append(loss.item())
    return Trained.of(losses, model)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers for a data set."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Return random integers below `high` for a data set."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def build(model: Callable[[], nn.Module]) -> nn.Module:
    """Return a model as a script makes it that seeds torch first."""
    torch.manual_seed(SEED)
    return model().double()
