"""Running average of the weights, which often validates better than the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from steadfast.config import EmaConfig
from steadfast.hooks.hook import HookContext
from steadfast.parallel.dtensor import local, reshard


class Ema:
    """Hook that keeps an exponential moving average of the trained parameters.

    Validation uses the average. After each update, average <- decay * average + (1 - decay) * weight, by torch's own
    function. Normalization layers keep the running statistics of the weights themselves.
    """

    def __init__(self, config: EmaConfig) -> None:
        self._update = get_ema_multi_avg_fn(config.decay)
        self._num_updates = 0
        self._averages: dict[str, Tensor] = {}  # by every name of a parameter, sharded like the parameter

    def setup(self, run: HookContext) -> None:
        averages: dict[Tensor, Tensor] = {}
        for name, weight in run.model.named_parameters(remove_duplicate=False):
            if weight.requires_grad:
                if weight not in averages:
                    averages[weight] = weight.detach().clone()
                self._averages[name] = averages[weight]

    def on_start(self, run: HookContext) -> None:
        # True in the first attempt, and after restoring a checkpoint without averages.
        if not self._num_updates:
            _copy(self._weights(run), self._local())

    @torch.no_grad()
    def on_step(self, run: HookContext) -> None:
        self._update(self._local(), self._weights(run), self._num_updates)
        self._num_updates += 1

    @contextmanager
    def validating(self, run: HookContext) -> Iterator[None]:
        """Give the model the averages within the context.

        The values are copied in place, because gradient buckets and shards refer to the parameters' memory.
        """
        reshard(run.model)
        weights = self._weights(run)
        own = list(map(torch.clone, weights))
        _copy(self._local(), weights)
        try:
            yield
        finally:
            # The device reads weights in pinned host memory by itself, and may not have read all of them yet.
            if any(weight.is_pinned() for weight in weights):
                torch.cuda.synchronize()
            _copy(own, weights)
            # Otherwise training would use the gathered averages.
            reshard(run.model)

    def state_dict(self) -> dict[str, object]:
        return {"averages": self._averages, "num_updates": self._num_updates}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # The averages are live tensors, which restoring has already filled in place.
        self._num_updates = state["num_updates"]

    def _local(self) -> list[Tensor]:
        # In the order of the parameters, and each tensor once, even if it has several names.
        return list(map(local, dict.fromkeys(self._averages.values())))

    def _weights(self, run: HookContext) -> list[Tensor]:
        # Also those that another hook has frozen since.
        return [local(weight.detach()) for name, weight in run.model.named_parameters() if name in self._averages]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
