"""Side effects of forwards on a model and its task: undo them, or name them."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steadfast.parallel.digest import digest
from steadfast.parallel.dtensor import is_sharded, local
from steadfast.tasks import Task
from steadfast.tasks.own import OwnTask

_TORCHS = frozenset(vars(nn.Module()))  # attributes of every module
_MOST = 64  # entries of a list or dictionary that are compared
Undo = dict[int, Callable[[], object]]  # what restores a value, by the value's identity


@contextmanager
def undone(model: nn.Module, task: Task | None = None) -> Iterator[None]:
    """Restore tensors, attributes and generators of a model and a task after the context.

    Tensors are copied to the host, because the device may have no room for a second model.
    """
    undo: Undo = {}
    # fsdp may gather or free its parameters meanwhile, so those of now must not come back.
    changing = {id(module) for module in model.modules()} if any(map(_is_unit, model.modules())) else set()
    for _, owner in _owners(model, task):
        attributes = vars(owner)
        undo[id(attributes)] = partial(_refill, attributes, dict(attributes))
        for name, value in attributes.items():
            if not (name == "_parameters" and id(owner) in changing):
                _keep(value, undo)
    try:
        yield
    finally:
        restore(undo)


def values_of(model: nn.Module, task: Task | None = None) -> dict[str, object]:
    """Return a comparable value of each tensor, number and generator, by its place such as `Net.layers.0.weight`.

    Sharded parameters and results of other tensors are left out.
    """
    found: dict[str, object] = {}
    sharded = any(map(is_sharded, model.parameters()))
    for path, owner in _owners(model, task):
        attributes = {name: value for name, value in vars(owner).items() if name not in _TORCHS}
        if isinstance(owner, nn.Module):
            attributes |= owner._buffers | dict.fromkeys(owner._modules, True)
            # Under fsdp parameters may be gathered or not.
            attributes |= dict.fromkeys(owner._parameters, True) if sharded else owner._parameters
            if type(owner).get_extra_state is not nn.Module.get_extra_state:
                attributes = owner._buffers | owner._parameters  # the others may be in the extra state
        found |= {f"{path}{name}": _comparable(value) for name, value in attributes.items()}
    return found


@contextmanager
def gathered_writes(model: nn.Module) -> Iterator[set[str]]:
    """Collect the names of parameters that a forward writes while they are gathered from shards.

    Such a write is lost when the parameters are sharded again.
    """
    written: set[str] = set()
    digests: dict[str, int] = {}  # a step's forwards all begin with the same parameters

    def look(path: str, unit: nn.Module, *_: object) -> None:
        for name, param in unit.named_parameters(path):
            if not is_sharded(param):
                found = int(digest([param]))
                if digests.setdefault(name, found) != found:
                    written.add(name)

    handles: list[Any] = []
    for path, unit in model.named_modules():
        if _is_unit(unit):
            handles.append(unit.register_forward_pre_hook(partial(look, path)))
            # Ahead of fsdp's own hook, which shards the parameters again.
            handles.append(unit.register_forward_hook(partial(look, path), prepend=True))
    try:
        yield written
    finally:
        for handle in handles:
            handle.remove()


def _is_unit(module: nn.Module) -> bool:
    """Return whether fsdp shards a module's parameters."""
    return callable(getattr(module, "reshard", None))


def _owners(model: nn.Module, task: Task | None) -> Iterator[tuple[str, object]]:
    """Yield a model's and a task's modules and the task, each with its attributes' prefix."""
    roots: list[tuple[str, Any]] = [(name_of(model), model)]
    own = task.unwrapped if isinstance(task, OwnTask) else task
    if hasattr(own, "__dict__"):
        roots.append((type(own).__name__, own))
        roots += [(f"{type(own).__name__}.{name}", value) for name, value in vars(own).items()]
    seen: set[int] = set()
    for prefix, root in roots:
        modules = root.named_modules() if isinstance(root, nn.Module) else [("", root)] if root is own else []
        for path, owner in modules:
            if id(owner) not in seen:
                seen.add(id(owner))
                yield f"{prefix}.{path}".rstrip(".") + ".", owner


def name_of(model: nn.Module) -> str:
    """Return the name of a model's class, without fsdp's prefix."""
    return next(kind.__name__ for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))


def restore(undo: Undo) -> None:
    for each in undo.values():
        each()


def put_back(tensor: Tensor, memory: Tensor, values: Tensor) -> None:
    """Restore a tensor's values, in the memory that the tensor had."""
    # A copy into `data` keeps the version, by which `StepBuffers` finds changes of a forward.
    local(memory).copy_(values)
    if not is_sharded(tensor) and tensor.data_ptr() != memory.data_ptr():
        tensor.data = memory


def _keep(value: Any, undo: Undo) -> None:
    """Add what restores a value in place."""
    if id(value) in undo:
        return
    match value:
        case list() | set() | deque() | dict() if type(value).__module__ in ("builtins", "collections"):
            undo[id(value)] = partial(_refill, value, value.copy())
            for each in list(value.values() if isinstance(value, dict) else value):
                if isinstance(each, Tensor):
                    _keep(each, undo)
        case Tensor() if _is_plain(value):
            undo[id(value)] = partial(put_back, value, value.data, local(value.data).to("cpu", copy=True))
        case np.ndarray():
            undo[id(value)] = partial(np.copyto, value, value.copy())
        case torch.Generator():
            undo[id(value)] = partial(value.set_state, value.get_state())
        case np.random.Generator():
            undo[id(value)] = partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        case random.Random():
            undo[id(value)] = partial(value.setstate, value.getstate())


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own, in which each element is once."""
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_inference():
        return False
    if hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor):
        return False  # a wrapper around other tensors
    return all(stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _refill(held: Any, before: Any) -> None:
    # A dictionary that is as before is not touched, because compiled code may watch its version.
    if isinstance(held, dict) and list(held) == list(before) and all(held[key] is before[key] for key in before):
        return
    held.clear()
    if isinstance(held, list | deque):
        held.extend(before)
    else:
        held.update(before)


def _comparable(value: Any) -> object:
    match value:
        case Tensor() if value.grad_fn is None and _is_plain(value) and not is_sharded(value):
            return tuple(value.shape), value.dtype, int(digest([value]))
        case np.ndarray():
            return value.tobytes()
        case bool() | int() | float() | complex() | str() | np.generic():
            return repr(value)  # NaN does not equal itself
        case list() | tuple() | deque() if len(value) <= _MOST:
            # Layers keep lists of their parameters, which are compared by their names.
            return tuple(_comparable(each) for each in value if not isinstance(each, nn.Parameter))
        case dict() if len(value) <= _MOST:
            return tuple((repr(key), _comparable(each)) for key, each in value.items())
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case random.Random():
            return value.getstate()
    return None
