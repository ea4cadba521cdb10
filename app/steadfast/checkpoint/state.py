"""State of a training run as named tensors, for any parallel strategy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadfast.data.batches import map_tensors
from steadfast.errors import TrainingError, UsageError
from steadfast.parallel.dtensor import is_sharded, local, on_mesh_of, unsharded
from steadfast.parallel.stages import held_elsewhere
from steadfast.world.control import gather_objects
from steadfast.world.runtime import World

# Tensors by name; a value may itself be such a dictionary.
Tensors = dict[str, Any]
# The parts of a run by name.
State = dict[str, Tensors]
_DIGEST_LENGTH = 32  # of 64 hexadecimal digits, enough to exclude accidental matches within a ledger


class Stateful(Protocol):
    """A part of a run that a checkpoint must hold."""

    def state_dict(self) -> Tensors:
        """Return live references, which loading overwrites in place; {} if none."""
        ...


class ModelState:
    """State of a model, with or without its frozen parameters."""

    def __init__(self, model: nn.Module, trainable_only: bool) -> None:
        self._model = model
        self._trainable_only = trainable_only
        self._left_out = frozen_parameters(model) if trainable_only else {}
        self._copies: dict[str, Tensor] = {}  # entries of the last state_dict that are copies

    def state_dict(self) -> Tensors:
        state: Tensors = dict(self._model.state_dict())
        self._copies = copies_in(self._model, state)
        for name in self._left_out:
            state.pop(name, None)
        # Parameters of other stages are on the meta device.
        for name, param in held_elsewhere(self._model).items():
            if param.requires_grad or not self._trainable_only:
                state[name] = param.detach()
        return state

    def refresh(self) -> None:
        """Copy the model's current values into the copies of the last `state_dict`."""
        if self._copies:
            current = self._model.state_dict()
            for name, tensor in self._copies.items():
                if current[name].shape != tensor.shape:
                    raise TrainingError(
                        f"the entry {name} of the model's state_dict() was {list(tensor.shape)}, and is "
                        f"{list(current[name].shape)} now; a checkpoint holds tensors of one shape"
                    )
                tensor.copy_(current[name])

    def load_copies(self) -> None:
        """Give the copies of the last `state_dict`, which were overwritten, to the model."""
        if self._copies:
            current = self._model.state_dict()
            current.update(self._copies)
            self._model.load_state_dict(current)


class RequiresGrad:
    """Flags of the parameters that require a gradient, which hooks may change."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._params = list(model.parameters())
        self._flags = torch.zeros(len(self._params), dtype=torch.uint8, device=device)

    def state_dict(self) -> Tensors:
        self.refresh()
        return {"flags": self._flags}

    def refresh(self) -> None:
        """Read the flags of the parameters."""
        self._flags.copy_(torch.tensor([param.requires_grad for param in self._params], dtype=torch.uint8))

    def load_copies(self) -> None:
        """Give the restored flags to the parameters."""
        for param, flag in zip(self._params, self._flags.tolist(), strict=True):
            param.requires_grad_(bool(flag))


class NamedOptimizer:
    """State of an optimizer by parameter name, for any parallel strategy."""

    # Hyperparameters are not part of the state: they come from the configuration, which may change on resume. Neither
    # are the order of the data, dropout and the learning rate, which are functions of the step.

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> Tensors:
        _materialize(self._optimizer)
        names: dict[Tensor, str] = {parameter: name for name, parameter in self._model.named_parameters()}
        return {names[parameter]: tensors for parameter, tensors in self._optimizer.state.items()}

    def adopt(self, state: Tensors) -> None:
        """Take over the shards of another optimizer of the same model."""
        for name, parameter in self._model.named_parameters():
            if name not in state:
                continue
            values = dict(state[name])
            for key, value in values.items():
                # The shards are on the mesh of the former world, whose groups no longer exist.
                if is_sharded(value):
                    values[key] = on_mesh_of(value, parameter)
            self._optimizer.state[parameter] = values


class HeldShards:
    """A rank's part of the state between two attempts.

    The next attempt can use it if the rank has the same box there.
    """

    def __init__(self, world: World, state: State) -> None:
        self.world = world
        self.state = state  # live references

    def take(self) -> State:
        """Return the state of model and optimizer without copying, and copies of other tensors."""
        # The next attempt has a new model and a new optimizer. Other tensors belong to objects that are used again.
        copied: State = map_tensors(torch.clone, {**self.state, "model": {}, "optimizer": {}})
        return {**copied, **{part: self.state[part] for part in ("model", "optimizer") if part in self.state}}


def newest_whole(steps: Sequence[int], replica_size: int) -> int:
    """Return the newest step whose `replica_size` parts all exist, 0 if none.

    Args:
        steps: the step that each rank holds, by rank.
    """
    for step in sorted(set(steps), reverse=True):
        if all(step in steps[part::replica_size] for part in range(replica_size)):
            return max(step, 0)
    return 0


def copy_state(source: State, target: State) -> None:
    """Overwrite a state with another one that has the same parts."""
    # Tensors that share their memory are skipped.
    others = flatten(source)
    for name, tensor in flatten(target).items():
        if name in others and local(tensor).data_ptr() != local(others[name]).data_ptr():
            local(tensor).copy_(local(others[name]))


class HeldState:
    """Record of the step to which this process's model and optimizer belong.

    Only the methods change the record.
    """

    def __init__(self) -> None:
        self.step: int | None = 0  # 0 for the initial state, None while the state is incomplete
        self.untouched = True  # nothing was written since the model was built
        self.copied: list[ModelState | RequiresGrad] = []  # parts whose tensors may be copies

    def begin_anew(self, lacks_weights: bool) -> None:
        """Record a new model, which is complete unless weights are still missing."""
        self.step = None if lacks_weights else 0
        self.untouched = True
        self.copied = []

    def complete(self, step: int) -> None:
        """Record that the state is complete and belongs to `step`."""
        self.step = step
        self.untouched = False

    def fill(self, step: int) -> None:
        """Record that the tensors of the state were filled with those of `step`."""
        for part in self.copied:
            part.load_copies()
        self.complete(step)

    def refresh(self) -> None:
        """Copy the current values into all tensors of the state that are copies."""
        for part in self.copied:
            part.refresh()

    def begin_overwriting(self) -> None:
        """Record that the state is about to be overwritten."""
        # A process that is interrupted meanwhile holds parts of two states, of which none is usable.
        self.step = None
        self.untouched = False


def app_state(parts: Mapping[str, Stateful]) -> State:
    """Return the state of all parts that have any, by name."""
    state = {}
    for name, part in parts.items():
        if tensors := part.state_dict():
            state[name] = tensors
    return state


def _materialize(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of parameters that have none, ahead of their first step."""
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    begun = set(optimizer.state)
    if begun.issuperset(params):
        return
    # torch creates the state in a step. Rate and gradients are zero, so the step changes no weight; what it has written
    # into the state is zeroed afterwards. Parameters with a state have no gradient, and take no part.
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = [parameter.grad for parameter in params]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in params:
        if parameter in begun:
            parameter.grad = None
        elif parameter.grad is None:  # an existing gradient is zero, because no step has begun
            parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except torch.OutOfMemoryError:
        raise  # too little memory is no fault of the optimizer
    except Exception as error:
        what = "the model's parameters"
        if any(map(is_sharded, params)):
            what = "parameters that fsdp has sharded (take parallel.kind=ddp)"
        raised = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"optimizer {type(optimizer).__name__} cannot update {what}: {raised}") from error
    for parameter, gradient in zip(params, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and parameter not in begun:
                value.zero_()


def flatten(state: Tensors, prefix: str = "") -> dict[str, Tensor]:
    """Return `{"a": {"b": t}}` as `{"a.b": t}`, in name order."""
    flat: dict[str, Tensor] = {}
    for name in sorted(state):
        value = state[name]
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            flat[f"{prefix}{name}"] = value
    return flat


def frozen_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters under all of their names."""
    # A state_dict lists a shared parameter under each of its names.
    named = model.named_parameters(remove_duplicate=False)
    return {name: param for name, param in named if not param.requires_grad}


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a model, each once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def copies_in(model: nn.Module, state: Tensors) -> dict[str, Tensor]:
    """Return the tensors of a state_dict that are not the model's own."""
    # Hooks of a state_dict may split, join or cast tensors, and `get_extra_state` makes new ones.
    own = set(map(_geometry, (*model.parameters(), *model.buffers())))
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    return {name: tensor for name, tensor in tensors.items() if _geometry(tensor) not in own}


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    part = local(tensor)
    if part.layout != torch.strided:
        return (id(tensor),)  # a buffer of no checkpoint
    return part.untyped_storage()._cdata, part.storage_offset(), part.shape, part.stride(), part.dtype


def buffers_outside_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that no checkpoint holds."""
    state = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in state}


def base_sha256(model: nn.Module) -> str:
    """Return a digest of a model's frozen parameters, "" if none."""
    frozen = frozen_parameters(model)
    if not frozen:
        return ""
    # The bytes alone would be equal for a matrix and for its flattened form.
    layout = [(name, str(frozen[name].dtype), tuple(frozen[name].shape)) for name in sorted(frozen)]
    return hashlib.sha256(f"{layout} {sha256(frozen)}".encode()).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """Return a digest of a model's trained parameters, equal in every world."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return sha256(trained)[:_DIGEST_LENGTH]


def sha256(state: Tensors, world: World | None = None) -> str:
    """Return the digest of all unsharded tensors in name order.

    A collective if tensors are sharded, or if `world` has stages that hold different ones.
    """
    tensors = flatten(state)
    if world is not None and world.stages > 1:
        return _digest_of(_of_stages(tensors, world))
    return _digest_of((name, _bytes_of(tensor)) for name, tensor in tensors.items())


def _digest_of(named: Iterable[tuple[str, Any]]) -> str:
    digest = hashlib.sha256()
    for name, data in named:
        digest.update(name.encode())
        digest.update(data)
    return digest.hexdigest()


def _of_stages(tensors: Mapping[str, Tensor], world: World) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of all tensors of a replica, from the first rank that holds each. A collective."""
    own = {name for name, tensor in tensors.items() if not tensor.is_meta}
    holders: dict[str, int] = {}
    for rank, names in enumerate(gather_objects(own, world.groups.control)):
        for name in names:
            holders.setdefault(name, rank)
    for name, holder in sorted(holders.items()):
        # All holders of a tensor gather its parts together.
        data = [bytes(_bytes_of(tensors[name])) if name in own else None]
        dist.broadcast_object_list(data, holder, group=world.groups.control)
        yield name, data[0]


def _bytes_of(tensor: Tensor) -> Any:
    # numpy has no bfloat16, so the numbers are viewed as bytes.
    return unsharded(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
