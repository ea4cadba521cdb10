"""Buffers that a forward changes, above all running statistics of normalization."""

import functools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from steadfast.data.parts import Part
from steadfast.errors import ConfigError, Problem, TrainingError
from steadfast.plan import Microbatch
from steadfast.world.communicator import Communicator
from steadfast.world.control import agree_on_names
from steadfast.world.groups import Groups

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


class Buffers:
    """Buffers that belong to a model's state; masks and tables never change.

    After each step the leader's values replace all buffers that a forward changes: codebooks, queues, the vectors of a
    spectral norm. Running statistics of normalization layers are excluded. The first step of an attempt shows which
    buffers change.
    """

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict()
        self._places: list[tuple[nn.Module, str, Tensor]] = []
        self._others: dict[str, Tensor] = {}  # buffers other than running statistics
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
        """Return the names of changing buffers; () before the first step."""
        # Running statistics are not among them.
        return self._changing or ()

    def begin(self) -> None:
        """Begin a step."""
        self._versions = {name: buffer._version for name, buffer in self._others.items()}

    def send(self, groups: Groups) -> None:
        """Start the broadcast of changed buffers from the leader. A collective."""
        # A forward may replace a buffer by a new tensor, which would be in no checkpoint.
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
        """Restore the buffers if the context fails."""
        before = self._current()
        try:
            yield
        except BaseException:
            self._put_back(before)
            raise

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore the buffers after the context."""
        before = self._current()
        try:
            yield
        finally:
            self._put_back(before)

    def _current(self) -> list[Tensor]:
        # Read from the module, because until the end of the step a forward may have replaced a buffer.
        return [getattr(module, name).clone() for module, name, _ in self._places]

    def _put_back(self, before: list[Tensor]) -> None:
        for (module, name, buffer), earlier in zip(self._places, before, strict=True):
            # A copy into `.data` keeps the version, by which `send` finds changes of a forward.
            buffer.data.copy_(earlier)
            # A forward may have put another tensor in the place of the buffer.
            setattr(module, name, buffer)


class RunningStatistics:
    """Running statistics of normalization layers, as one process computes them.

    A layer moves its running statistics r by those of a microbatch, s: r <- (1 - m) r + m s. The n microbatches of a
    step, one after the other, make of it

        (1 - m)^n r  +  sum over microbatches i of  (1 - m)^(n - 1 - i) m s_i,

    a sum like that of the gradients: each rank adds the terms of its own microbatches, in any world. To separate the
    terms, every forward begins with the statistics of the step before. So a backward may also run a forward again, as
    activation checkpointing does. In a layer that a forward uses several times, the uses after the first differ from
    those of one process by the order of the uses.
    """

    def __init__(self, model: nn.Module) -> None:
        self._all: list[Any] = []
        for module in model.modules():
            if isinstance(module, _WITH_STATISTICS) and module.running_mean is not None:
                self._all.append(module)
        self._counts: dict[nn.Module, int] = {}  # microbatches before this step, of layers without a momentum
        self._layers: list[Any] = []  # layers in training mode: the user may have put some into evaluation mode
        self._num_microbatches = 0
        self._running: list[Tensor] = []
        self._before: list[Tensor] = []  # values of `_running` before this step
        self._moved: list[Tensor] = []  # this rank's part of the sum
        self._shares: list[_Shares] = []  # one for each tensor of `_running`
        self._kept_by_one: list[float] = []
        self._kept_by_all: list[float] = []
        self._tracked: list[Tensor] = []
        self._tracked_before: list[Tensor] = []
        self._flat: Tensor

    def begin(self, num_microbatches: int) -> None:
        """Begin a step.

        Args:
            num_microbatches: number of microbatches that all ranks together compute in the step.
        """
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
        self._before = list(map(torch.clone, self._running))
        self._tracked_before = list(map(torch.clone, self._tracked))

    def forwarded(self, microbatch: Microbatch, share: float = 1.0) -> None:
        """Add the statistics of one forward to this rank's sum.

        Args:
            share: part of the microbatch's samples in this forward; the statistics of several parts are averaged.
        """
        if self._layers and microbatch.weight:  # a pad, of weight 0, does not count
            kept = torch._foreach_mul(self._before, self._kept_by_one)
            moved = torch._foreach_sub(self._running, kept)  # m s
            torch._foreach_mul_(moved, [share * shares.of_each[microbatch.index] for shares in self._shares])
            torch._foreach_add_(self._moved, moved)

    def put_back(self) -> None:
        """Restore the statistics from before the step.

        Call it after the backward, which needs them unchanged.
        """
        if self._layers:
            torch._foreach_copy_(self._running, self._before)
            torch._foreach_copy_(self._tracked, self._tracked_before)

    def send(self, communicator: Communicator) -> None:
        """Start to sum this step's statistics over all ranks."""
        if self._layers:
            self._flat = torch.cat(self._moved)
            communicator.sum(self._flat)

    def finish(self) -> None:
        """Apply a step's update to the running statistics, once the step has passed the gate."""
        if not self._layers:
            return
        torch._foreach_mul_(self._running, self._kept_by_all)
        torch._foreach_add_(self._running, list(self._flat.split(list(map(len, self._running)))))
        torch._foreach_add_(self._tracked, self._num_microbatches)
        for layer in self._layers:
            if layer in self._counts:
                self._counts[layer] += self._num_microbatches


class StepBuffers:
    """Buffers of a model during the forwards of a training step."""

    def __init__(self, model: nn.Module, exact: bool) -> None:
        self._buffers = Buffers(model)
        self._statistics = RunningStatistics(model)
        self._exact = exact

    @classmethod
    def of(cls, model: nn.Module, exact: bool) -> Self | None:
        """Return the buffers of a model, None without any."""
        return None if next(model.buffers(), None) is None else cls(model, exact)

    @contextmanager
    def step(self, num_microbatches: int) -> Iterator[None]:
        """Begin a step, and restore the buffers if the step fails.

        A survivor runs a failed step again, and the step's forwards must count once.

        Args:
            num_microbatches: number of microbatches that all ranks together compute in the step.
        """
        with self._buffers.undone_on_failure():
            self._buffers.begin()
            self._statistics.begin(num_microbatches)
            yield

    @contextmanager
    def forward(self, part: Part) -> Iterator[None]:
        """Run a forward and its backward; a pad changes no buffer."""
        if part.weight:
            yield
        else:
            with self._buffers.undone():
                yield
        self._statistics.put_back()

    def forwarded(self, part: Part) -> None:
        """Add the running statistics of a forward to the step's statistics.

        Call this method before the forward's backward, which may run the forward again.
        """
        self._statistics.forwarded(part.microbatch, part.share)

    def undone(self) -> AbstractContextManager[None]:
        """Restore the buffers after the context."""
        return self._buffers.undone()

    def send(self, groups: Groups) -> None:
        """Start to give all ranks the buffers of the whole step. A collective.

        Raises:
            TrainingError: the run is exact, and a buffer would depend on the number of workers.
        """
        self._buffers.send(groups)
        if self._exact and self._buffers.changing:
            raise TrainingError(
                f"run.exact: a forward changes the model's buffer {self._buffers.changing[0]}, whose value then comes "
                "from rank 0's microbatches, and so depends on the number of workers. Set run.exact=false"
            )
        self._statistics.send(groups.communicator)

    def finish(self) -> None:
        """Apply a step's update to the running statistics, once the step has passed the gate."""
        self._statistics.finish()


class _Shares(NamedTuple):
    """Factors of the old statistics and of each microbatch's in the result."""

    of_one: float  # factor of the old statistics after a single forward
    of_all: float  # factor of the old statistics after all microbatches
    of_each: tuple[float, ...]  # factor of the statistics that each microbatch's forward has added


@functools.lru_cache
def _shares(momentum: float | None, num_before: int, num_microbatches: int) -> _Shares:
    kept: list[float] = []  # factor that each microbatch in turn applies to the previous value
    for index in range(num_microbatches):
        share = momentum
        # Without a momentum the statistics are the average over all microbatches so far.
        if share is None:
            share = 1 / (num_before + index + 1)
        kept.append(1 - share)
    of_each: list[float] = []
    for index, own in enumerate(kept):
        # Every forward starts as if it were the first, whose factor may have been larger.
        scale = 1.0
        if own != kept[0]:
            scale = (1 - own) / (1 - kept[0])
        of_each.append(scale * math.prod(kept[index + 1 :]))
    return _Shares(kept[0], math.prod(kept), tuple(of_each))


def refuse_synchronized(model: nn.Module) -> None:
    """Refuse a layer whose statistics would depend on the number of workers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            what = (
                f"its layer {name} is a SyncBatchNorm: it mixes one microbatch of every worker, so the result would "
                "depend on their number. Use a BatchNorm: here a BatchNorm has the statistics of a microbatch, and its "
                "running statistics are those of all microbatches of a step, in any world. For larger groups raise "
                "batch.microbatch_size"
            )
            raise ConfigError([Problem("", "model", what)])


def refuse_batch_statistics(model: nn.Module) -> None:
    """Refuse layers whose statistics of a microbatch differ from those of its parts."""
    for name, module in model.named_modules():
        tracks = isinstance(module, _WITH_STATISTICS) and module.training and module.running_mean is not None
        # A BatchNorm without running statistics takes those of its microbatch in evaluation mode too.
        mixes = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        if tracks or mixes:
            what = (
                f"its layer {name} ({type(module).__name__}) has statistics of a microbatch, which a part of it does "
                "not have, so batch.balance=even_samples cannot cut it. Use GroupNorm, or set batch.balance=even"
            )
            raise ConfigError([Problem("", "model", what)])


def refuse_running_statistics(model: nn.Module) -> None:
    """Refuse trained running statistics, whose sum over ranks rounds."""
    for name, module in model.named_modules():
        if isinstance(module, _WITH_STATISTICS) and module.training and module.running_mean is not None:
            what = (
                f"its layer {name} keeps running statistics, a sum over microbatches whose last bits depend on the "
                "number of workers, so run.exact cannot hold. Use GroupNorm, or set run.exact=false"
            )
            raise ConfigError([Problem("", "model", what)])
