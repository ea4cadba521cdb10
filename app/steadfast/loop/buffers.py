"""Buffers that a forward changes, above all running statistics of normalization."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from steadfast.data.parts import Part
from steadfast.errors import ConfigError, Problem, TrainingError
from steadfast.loop.side_effects import Undo, gathered_writes, name_of, put_back, restore, undone, values_of
from steadfast.parallel.digest import digest
from steadfast.parallel.dtensor import is_sharded, local
from steadfast.plan import Microbatch
from steadfast.world.communicator import Communicator
from steadfast.world.control import agree_on_names
from steadfast.world.groups import Groups

if TYPE_CHECKING:
    from steadfast.loop.worker_state import WorkerState

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclass
class Effects:
    """State that forwards change, as the first step of a process has shown."""

    changing: tuple[str, ...] | None = None  # parameters and buffers of checkpoints, the same on all ranks
    unsaved: tuple[str, ...] = ()  # places that no checkpoint holds


class Place(NamedTuple):
    """A parameter or persistent buffer of a module."""

    module: nn.Module
    name: str
    tensor: Tensor
    memory: Tensor  # of the tensor, to which checkpoints refer; a forward may give the tensor another one

    @property
    def kind(self) -> str:
        if isinstance(self.tensor, nn.Parameter):
            return "parameter"
        return "statistic" if isinstance(self.module, _WITH_STATISTICS) else "buffer"

    def settle(self, name: str) -> None:
        """Copy a tensor that a forward has put in this place into the memory of the place."""
        current, held = getattr(self.module, self.name), self.memory
        if current is self.tensor and current.data_ptr() == held.data_ptr() and current.shape == held.shape:
            return
        fits = current is not None and torch.promote_types(current.dtype, held.dtype) == held.dtype
        if not fits or current.shape != held.shape:
            raise TrainingError(
                f"a forward changes the model's {self.kind} {name} from {_layout(held)} to {_layout(current)}, and "
                "checkpoints hold tensors of one shape and type. Create it in its largest shape, and count in another "
                "buffer how much of it is in use; a cache may be a buffer with persistent=False"
            )
        values = current.detach()
        self.tensor.data = held
        self.tensor.detach().copy_(values)
        setattr(self.module, self.name, self.tensor)


def _layout(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


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
        found = (module for module in model.modules() if isinstance(module, _WITH_STATISTICS))
        self._all: list[Any] = [module for module in found if module.running_mean is not None]
        self._counts: dict[nn.Module, int] = {}  # microbatches before this step, of layers without a momentum
        self._layers: list[Any] = []  # layers in training mode: the user may have put some into evaluation mode
        self._num_microbatches = 0
        self._running: list[Tensor] = []
        self._before: list[Tensor] = []  # values of `_running` before this step
        self._moved: list[Tensor] = []  # this rank's part of the sum
        self._shares: list[_Shares] = []  # one for each tensor of `_running`
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
        self._running, self._shares = [], []
        for layer in self._layers:
            if layer.momentum is None and layer not in self._counts:
                self._counts[layer] = int(layer.num_batches_tracked)
            self._running += [layer.running_mean, layer.running_var]
            self._shares += 2 * [_shares(layer.momentum, self._counts.get(layer, 0), num_microbatches)]
        self._tracked = [layer.num_batches_tracked for layer in self._layers]
        self._moved = list(map(torch.zeros_like, self._running))
        self._before = list(map(torch.clone, self._running))
        self._tracked_before = list(map(torch.clone, self._tracked))

    def forwarded(self, microbatch: Microbatch, share: float = 1.0) -> None:
        """Add the statistics of one forward to this rank's sum.

        Args:
            share: part of the microbatch's samples in this forward; the statistics of several parts are averaged.
        """
        if self._layers and microbatch.weight:  # a pad, of weight 0, does not count
            kept = torch._foreach_mul(self._before, [shares.of_one for shares in self._shares])
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
        torch._foreach_mul_(self._running, [shares.of_all for shares in self._shares])
        torch._foreach_add_(self._running, list(self._flat.split(list(map(len, self._running)))))
        torch._foreach_add_(self._tracked, self._num_microbatches)
        for layer in self._layers:
            if layer in self._counts:
                self._counts[layer] += self._num_microbatches


class StepBuffers:
    """State of a model and a task that the forwards of a training step change; masks and tables never change.

    After each step the leader's values replace all tensors of checkpoints that a forward changes: codebooks, queues,
    the vectors of a spectral norm, layers that the first batch initializes, momentum encoders. Running statistics of
    normalization layers are summed instead. The first step of a process shows which state changes.

    Args:
        replicated: whether every worker holds the whole model.
    """

    def __init__(self, worker: WorkerState, model: nn.Module, replicated: bool) -> None:
        self._worker = worker
        self._effects = worker.effects
        self._model = model
        self._replicated = replicated
        self._statistics = RunningStatistics(model)
        self._places = _places_of(model)
        self._shards = {name: param for name, param in model.named_parameters() if is_sharded(param)}
        known = self._effects.changing or ()
        # Those that a step may change.
        self._watched = {name: at for name, at in self._places.items() if at.kind != "parameter" or name in known}
        self._changing: tuple[str, ...] | None = None  # the same on all ranks; None before the attempt's first step
        self._before: dict[str, object] | None = None  # versions and values before an attempt's first step
        self._lost: set[str] = set()  # parameters that were written while they were gathered

    @property
    def is_needed(self) -> bool:
        """Return whether later steps may change anything."""
        return bool(self._watched)

    @contextmanager
    def step(self, num_microbatches: int) -> Iterator[None]:
        """Begin a step, and restore the tensors if the step fails.

        A survivor runs a failed step again, and the step's forwards must count once.

        Args:
            num_microbatches: number of microbatches that all ranks together compute in the step.
        """
        undo = self._kept()
        with ExitStack() as stack:
            if self._effects.changing is None:
                self._lost = stack.enter_context(gathered_writes(self._model))
            if self._changing is None:
                self._before = self._values()
            self._statistics.begin(num_microbatches)
            try:
                yield
            except BaseException:
                restore(undo)
                # To put back parameters that only this step has shown to change, it would need a copy of all.
                if any(name in self._places and name not in self._watched for name in self._changed()):
                    self._worker.forget(copies=False)
                raise
            finally:
                self._before = None

    def _kept(self) -> Undo:
        """Return what restores the tensors that may change."""
        undo: Undo = {}
        for place in self._watched.values():
            # Read from the module, because until the end of the step a forward may have replaced a buffer.
            current = getattr(place.module, place.name)
            if current is not None:
                undo[id(current)] = partial(put_back, current, current.data, current.detach().clone())
            undo[id(place)] = partial(setattr, place.module, place.name, current)
        return undo

    def _values(self) -> dict[str, object]:
        """Return the versions of tensors that may change, and in the process's first step the values of all state."""
        # A written value may be equal now, for example that of a running maximum, and differ after a later step.
        versions: dict[str, object] = {name: place.tensor._version for name, place in self._watched.items()}
        if self._effects.changing is not None:
            return versions
        shards = {name: int(digest([local(param)])) for name, param in self._shards.items()}
        return values_of(self._model, self._worker.task) | shards | versions

    def _changed(self) -> list[str]:
        """Return what the attempt's first step has changed, tensors of checkpoints by their names."""
        if self._before is None:
            return []
        after, prefix = self._values(), f"{name_of(self._model)}."
        names = {f"{prefix}{name}": name for name in self._places}
        found = [place for place in {**self._before, **after} if self._before.get(place) != after.get(place)]
        return list(dict.fromkeys(names.get(place, place) for place in found))

    @contextmanager
    def forward(self, part: Part) -> Iterator[None]:
        """Run a forward and its backward; a pad changes no buffer."""
        if part.weight:
            yield
        else:
            with self.undone():
                yield
        self._statistics.put_back()

    def forwarded(self, part: Part) -> None:
        """Add the running statistics of a forward to the step's statistics.

        Call this method before the forward's backward, which may run the forward again.
        """
        self._statistics.forwarded(part.microbatch, part.share)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restore the state after the context."""
        # Until the first step has ended nothing is known of parameters.
        if self._effects.changing is None:
            with undone(self._model, self._worker.task):
                yield
            return
        undo = self._kept()
        try:
            yield
        finally:
            restore(undo)

    def send(self, groups: Groups) -> None:
        """Start to give all ranks the buffers of the whole step. A collective.

        Raises:
            TrainingError: a tensor has another shape or type.
        """
        for name, place in (self._places if self._changing is None else self._watched).items():
            place.settle(name)
        if self._changing is None:
            self._find_changing(groups)
        for name in self._changing or ():
            if name in self._places:
                groups.communicator.broadcast(self._places[name].memory, 0)
        self._statistics.send(groups.communicator)

    def _find_changing(self, groups: Groups) -> None:
        """Agree on what forwards change, in the first step of an attempt. A collective."""
        changed = self._changed()
        known = {*self._places, *self._shards}
        unsaved = [name for name in changed if name not in known]
        # Of a layer that the forward has made, its own name is enough.
        made = tuple(f"{name}." for name in unsaved)
        self._effects.unsaved = tuple(name for name in unsaved if not name.startswith(made)) or self._effects.unsaved
        own = [name for name in dict.fromkeys([*changed, *self._lost]) if name in known]
        own = [name for name in own if name not in self._places or self._places[name].kind != "statistic"]
        self._changing = self._effects.changing = agree_on_names(self._effects.changing or own, groups.control)
        self._watched |= {name: self._places[name] for name in self._changing if name in self._places}

    def finish(self) -> None:
        """Apply a step's update to the running statistics, once the step has passed the gate.

        Raises:
            TrainingError: the run is exact, and a tensor would depend on the number of workers; or a change of a
                forward cannot be kept.
        """
        # Not before the gate, which tells that ranks of fsdp have run different layers: then parameters seem to change.
        for name in self._changing or ():
            kind = self._places[name].kind if name in self._places else "parameter"
            if kind == "parameter" and not self._replicated:
                raise TrainingError(
                    f"a forward changes the model's parameter {name}, of which each worker holds only a part, so the "
                    "change would be lost or differ between workers. Take parallel.kind=ddp, or keep the values in a "
                    "buffer"
                )
            if self._worker.config.run.exact:
                raise TrainingError(
                    f"run.exact: a forward changes the model's {kind} {name}, whose value then comes from rank 0's "
                    "microbatches, and so depends on the number of workers. Set run.exact=false"
                )
        self._statistics.finish()


def _places_of(model: nn.Module) -> dict[str, Place]:
    """Return the parameters and persistent buffers that this worker holds whole."""
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        for name in (*module._parameters, *module._buffers):
            tensor = getattr(module, name)
            # A parameter of another stage is on the meta device.
            if tensor is None or tensor.is_meta or is_sharded(tensor) or name in module._non_persistent_buffers_set:
                continue
            places[f"{path}.{name}".lstrip(".")] = Place(module, name, tensor, tensor.data)
    return places


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


def refuse_layers(model: nn.Module, exact: bool, even_samples: bool) -> None:
    """Refuse layers whose statistics would depend on the number of workers.

    Args:
        exact: whether last bits count.
        even_samples: whether microbatches are cut.
    """
    for name, module in model.named_modules():
        tracks = isinstance(module, _WITH_STATISTICS) and module.training and module.running_mean is not None
        # A BatchNorm without running statistics takes those of its microbatch in evaluation mode too.
        mixes = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        if isinstance(module, nn.SyncBatchNorm):
            what = (
                "is a SyncBatchNorm: it mixes one microbatch of every worker, so the result would depend on their "
                "number. Use a BatchNorm: here a BatchNorm has the statistics of a microbatch, and its running "
                "statistics are those of all microbatches of a step, in any world. For larger groups raise "
                "batch.microbatch_size"
            )
        elif even_samples and (tracks or mixes):
            what = (
                f"({type(module).__name__}) has statistics of a microbatch, which a part of it does not have, so "
                "batch.balance=even_samples cannot cut it. Use GroupNorm, or set batch.balance=even"
            )
        elif exact and tracks:
            what = (
                "keeps running statistics, a sum over microbatches whose last bits depend on the number of workers, so "
                "run.exact cannot hold. Use GroupNorm, or set run.exact=false"
            )
        else:
            continue
        raise ConfigError([Problem("", "model", f"its layer {name} {what}")])
