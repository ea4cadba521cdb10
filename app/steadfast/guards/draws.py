"""Refuse losses that draw random numbers, where microbatches are cut between ranks."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from steadfast.config import BatchConfig
from steadfast.data.batches import Batch
from steadfast.errors import UsageError
from steadfast.tasks import Sums, Task


def task_of_steps(task: Task, batch: BatchConfig, device: torch.device) -> Task:
    """Return the task of the training steps, which may draw only if no microbatch is cut."""
    return DrawlessTask(task, device) if batch.balance == "even_samples" else task


class DrawlessTask:
    """Task whose losses and embeddings must draw no random numbers.

    Draws are keyed by microbatch, so a part of a microbatch would draw other numbers than the whole. Every forward is
    checked, also of whole microbatches: otherwise a run would end only once it has lost a worker.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task: Any = task
        self._device = device

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        with no_draws(self._device):
            sums: Sums = self._task.loss(model, batch)
        return sums

    def embed(self, model: nn.Module, batch: Batch) -> Any:
        with no_draws(self._device):
            return self._task.embed(model, batch)

    def loss_of_embeddings(self, embeddings: Any) -> Sums:
        # The loss of the whole global batch may draw: its samples are the same in any world.
        sums: Sums = self._task.loss_of_embeddings(embeddings)
        return sums


@contextmanager
def no_draws(device: torch.device) -> Iterator[None]:
    """Refuse random draws in the context.

    The generators of torch, numpy and Python are compared, and the device's own.

    Raises:
        UsageError: a generator has another state after the context.
    """
    before = _states(device)
    yield
    for name, state in _states(device).items():
        if state != before[name]:
            raise UsageError(
                f"batch.balance=even_samples: the model or task draws numbers from the generator of {name} in a "
                "forward, as dropout does, and a part of a microbatch would draw other numbers than the whole. Set "
                "batch.balance=even"
            )


def _states(device: torch.device) -> dict[str, object]:
    numpy_state: Any = np.random.get_state()
    _, numpy_keys, *numpy_place = numpy_state
    states: dict[str, object] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (numpy_keys.tobytes(), numpy_place),
        "Python": random.getstate(),
    }
    if device.type == "cuda":
        states["the GPU"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return states
