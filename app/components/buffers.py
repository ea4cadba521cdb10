"""Buffers of a model that a forward changes, above all the running statistics of normalization layers."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from app.errors import ConfigError, Problem
from app.plan import Microbatch
from app.world.communicator import Communicator
from app.world.control import agree_on_names
from app.world.groups import Groups

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


class Buffers:
    """The buffers that belong to a model's state; others, such as masks and tables, never change.

    Those that a forward changes, but for the running statistics of normalization layers, are the leader's after each
    step: codebooks, queues, the vectors of a spectral norm. Which these are is seen in an attempt's first step.
    """

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict()
        self._places: list[tuple[nn.Module, str, Tensor]] = []
        self._others: dict[str, Tensor] = {}  # that are no running statistics
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(prefix, recurse=False):
                if name in state:
                    self._places.append((module, name.rpartition(".")[2], buffer))
                    if not isinstance(module, _WITH_STATISTICS):
                        self._others[name] = buffer
        self._versions: dict[str, int] = {}
        self._changing: tuple[str, ...] | None = None  # the same on all ranks

    @property
    def changing(self) -> tuple[str, ...]:
        """Return those that a forward changes, running statistics apart; () before the first step has seen it."""
        return self._changing or ()

    def begin(self) -> None:
        """Begin a step."""
        self._versions = {name: buffer._version for name, buffer in self._others.items()}

    def send(self, groups: Groups) -> None:
        """Launch the overwriting of what has changed by the leader's. A collective."""
        # What a forward has put in a buffer's place would be in no checkpoint.
        for module, name, buffer in self._places:
            current = getattr(module, name)
            if current is not buffer:
                buffer.copy_(current)
                setattr(module, name, buffer)
        if not self._others:
            return
        if self._changing is None:
            changed: list[str] = []
            for name, buffer in self._others.items():
                if buffer._version != self._versions[name]:
                    changed.append(name)
            self._changing = agree_on_names(changed, groups.control)
        for name in self._changing:
            groups.communicator.broadcast(self._others[name], 0)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Give the buffers back what they held before, if what is done within fails."""
        before = self._current()
        try:
            yield
        except BaseException:
            self._put_back(before)
            raise

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Give the buffers back what they held before."""
        before = self._current()
        yield
        self._put_back(before)

    def _current(self) -> list[Tensor]:
        # Not of those that are kept: until the end of the step a forward may have put others in their place.
        return [getattr(module, name).clone() for module, name, _ in self._places]

    def _put_back(self, before: list[Tensor]) -> None:
        for (module, name, buffer), earlier in zip(self._places, before, strict=True):
            buffer.data.copy_(earlier)  # which is no change that a forward has made: `send` looks for those
            setattr(module, name, buffer)  # in place of what a forward may have put there


class RunningStatistics:
    """The running statistics of normalization layers, as one process would have them after each step.

    A layer moves its running statistics r by those of a microbatch, s: r <- (1 - m) r + m s. The n microbatches of a
    step, one after the other, make of it

        (1 - m)^n r  +  sum over microbatches i of  (1 - m)^(n - 1 - i) m s_i,

    a sum like that of the gradients: each rank adds the terms of its own microbatches, and no world enters. For that
    every forward begins with the statistics of the step before, which also makes it harmless that a backward runs a
    forward again, as activation checkpointing does. A layer that a forward uses several times is off by the order of
    its uses.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [module for module in model.modules() if isinstance(module, _WITH_STATISTICS)]
        self._all: list[Any] = [layer for layer in found if layer.running_mean is not None]
        self._counts: dict[nn.Module, int] = {}  # microbatches before this step, of layers that average over all
        self._layers: list[Any] = []  # those that train: the user may have put some into evaluation mode
        self._num_microbatches = 0
        self._running: list[Tensor] = []
        self._before: list[Tensor] = []  # what they were before this step
        self._moved: list[Tensor] = []  # this rank's part of the sum
        self._shares: list[_Shares] = []  # of each of them
        self._kept_by_one: list[float] = []
        self._kept_by_all: list[float] = []
        self._tracked: list[Tensor] = []
        self._tracked_before: list[Tensor] = []
        self._flat: Tensor

    def begin(self, num_microbatches: int) -> None:
        """Begin a step of so many microbatches, of all ranks together."""
        self._layers = [layer for layer in self._all if layer.training]
        self._num_microbatches = num_microbatches
        for each in (self._running, self._moved, self._tracked, self._shares, self._kept_by_one, self._kept_by_all):
            each.clear()
        for layer in self._layers:
            if layer.momentum is None and layer not in self._counts:
                self._counts[layer] = int(layer.num_batches_tracked)
            self._tracked.append(layer.num_batches_tracked)
            shares = _shares(layer.momentum, self._counts.get(layer, 0), num_microbatches)
            for running in (layer.running_mean, layer.running_var):
                self._running.append(running)
                self._moved.append(torch.zeros_like(running))
                self._shares.append(shares)
                self._kept_by_one.append(shares.of_one)
                self._kept_by_all.append(shares.of_all)
        self._before = _copies(self._running)
        self._tracked_before = _copies(self._tracked)

    def forwarded(self, microbatch: Microbatch, share: float = 1.0) -> None:
        """Take note of what a forward of a microbatch, or of a share of its samples, has made of the statistics.

        Those of a microbatch that is run in parts are the mean of its parts'.
        """
        if self._layers and microbatch.weight:  # a pad is no microbatch
            kept = torch._foreach_mul(self._before, self._kept_by_one)
            moved = torch._foreach_sub(self._running, kept)  # m s
            torch._foreach_mul_(moved, [share * shares.of_each[microbatch.index] for shares in self._shares])
            torch._foreach_add_(self._moved, moved)

    def put_back(self) -> None:
        """Have the statistics as they were before the step. After the backward, which needs them unchanged."""
        if self._layers:
            torch._foreach_copy_(self._running, self._before)
            torch._foreach_copy_(self._tracked, self._tracked_before)

    def send(self, communicator: Communicator) -> None:
        """Launch the sum over all ranks."""
        if self._layers:
            self._flat = torch.cat(self._moved)
            communicator.sum(self._flat)

    def finish(self) -> None:
        """Make the sum the statistics of this step. Behind the gate."""
        if not self._layers:
            return
        torch._foreach_mul_(self._running, self._kept_by_all)
        torch._foreach_add_(self._running, list(self._flat.split(list(map(len, self._running)))))
        torch._foreach_add_(self._tracked, self._num_microbatches)
        for layer in self._layers:
            if layer in self._counts:
                self._counts[layer] += self._num_microbatches


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


class _Shares(NamedTuple):
    """What the statistics before a step count after it, and what each microbatch's does as a forward leaves it."""

    of_one: float  # of those before, after a single forward
    of_all: float  # of those before, after all
    of_each: tuple[float, ...]


@functools.lru_cache
def _shares(momentum: float | None, num_before: int, num_microbatches: int) -> _Shares:
    kept: list[float] = []  # of what was there, by each microbatch in turn
    for index in range(num_microbatches):
        # Without a momentum it is the average over all microbatches ever.
        kept.append(1 - (1 / (num_before + index + 1) if momentum is None else momentum))
    of_each: list[float] = []
    for index, own in enumerate(kept):
        # Every forward stands in the place of the first one, which may have moved them by more.
        scale = 1.0 if own == kept[0] else (1 - own) / (1 - kept[0])
        of_each.append(scale * math.prod(kept[index + 1 :]))
    return _Shares(kept[0], math.prod(kept), tuple(of_each))


def refuse_synchronized(model: nn.Module) -> None:
    """Raise ConfigError for a layer whose statistics would depend on the number of workers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            what = (
                f"its layer {name} is a SyncBatchNorm: it mixes one microbatch of every worker, so the result would "
                "follow from their number. Leave it a BatchNorm: here that has the statistics of a microbatch, and its "
                "running ones are those of all microbatches of a step, whatever the world. For larger groups raise "
                "batch.microbatch_size"
            )
            raise ConfigError([Problem("", "model", what)])


def refuse_running_statistics(model: nn.Module) -> None:
    """Raise ConfigError for a layer that trains and whose running statistics are a sum with rounding over ranks."""
    for name, module in model.named_modules():
        if isinstance(module, _WITH_STATISTICS) and module.training and module.running_mean is not None:
            what = (
                f"its layer {name} keeps running statistics, a sum over microbatches whose last bits follow from the "
                "number of workers, so run.exact cannot hold. Take GroupNorm, or run.exact=false"
            )
            raise ConfigError([Problem("", "model", what)])
