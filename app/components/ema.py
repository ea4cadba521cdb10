"""A running average of the weights, which often validates better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from app.components.hook import HookContext
from app.config import EmaConfig
from app.parallel.dtensor import local, reshard


class Ema:
    """A hook that keeps an exponential moving average of the parameters that train. They are validated by it.

    After each update, average <- decay * average + (1 - decay) * weight, by torch's own function. A state of
    normalization layers is that of the weights themselves.
    """

    def __init__(self, config: EmaConfig) -> None:
        self._update = get_ema_multi_avg_fn(config.decay)
        self._num_updates = 0
        self._averages: dict[str, Tensor] = {}  # by all names of a parameter, sharded as it is

    def setup(self, run: HookContext) -> None:
        averages = {weight: weight.detach().clone() for weight in _weights(run)}
        for name, weight in run.model.named_parameters(remove_duplicate=False):
            if weight in averages:
                self._averages[name] = averages[weight]

    def on_start(self, run: HookContext) -> None:
        # The first attempt, or one that goes on from a checkpoint without averages.
        if not self._num_updates:
            _copy(_local(run), self._local())

    @torch.no_grad()
    def on_step(self, run: HookContext) -> None:
        self._update(self._local(), _local(run), self._num_updates)
        self._num_updates += 1

    @contextmanager
    def validating(self, run: HookContext) -> Iterator[None]:
        """Lend the model the averages. In place, since gradient buckets and shards know its own memory."""
        reshard(run.model)
        weights = _local(run)
        own = [weight.clone() for weight in weights]
        _copy(self._local(), weights)
        try:
            yield
        finally:
            if any(weight.is_pinned() for weight in weights):
                torch.cuda.synchronize()  # they are kept on the host, and the device may not have read all of them yet
            _copy(own, weights)
            reshard(run.model)  # or what was gathered of the averages would be trained

    def state_dict(self) -> dict[str, object]:
        return {"averages": self._averages, "num_updates": self._num_updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # The averages are live tensors: they have been filled in place.
        self._num_updates = state["num_updates"]

    def _local(self) -> list[Tensor]:
        # In the order of the parameters, each once, whatever its names.
        return list(map(local, dict.fromkeys(self._averages.values())))


def _weights(run: HookContext) -> list[Tensor]:
    return [weight for weight in run.model.parameters() if weight.requires_grad]


def _local(run: HookContext) -> list[Tensor]:
    return [local(weight.detach()) for weight in _weights(run)]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
