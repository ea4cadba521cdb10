"""Check before the first step that a checkpoint can save and restore a model."""

import io
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from steadfast.checkpoint.shards import DTYPE_NAMES
from steadfast.checkpoint.state import copies_in
from steadfast.errors import ConfigError, Problem
from steadfast.parallel.digest import digest

_EXTRA = "_extra_state"  # end of the name under which a state_dict has the result of `get_extra_state`


def refuse_unsaved(model: nn.Module, replicated: bool) -> None:
    """Refuse a model with state that a checkpoint would not hold.

    Args:
        replicated: whether every worker holds the whole model.
    """
    state = model.state_dict()
    params, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    for name, value in state.items():
        kind = "parameter" if name in params else "buffer" if name in buffers else "state_dict() entry"
        if isinstance(value, Tensor):
            if why := _unknown_type(value):
                _refuse(f"its {kind} {name} {why}")
        elif name.endswith(_EXTRA) and not _is_empty(value):
            owner = name.removesuffix(_EXTRA).rstrip(".")
            _refuse(
                f"get_extra_state() of {_described(model, owner)} returns a {type(value).__name__}, and checkpoints "
                "hold only tensors: return one tensor of a fixed shape, or keep the numbers in buffers"
            )
    if replicated:
        return
    for name, copy in copies_in(model, state).items():
        if copy.numel():
            _refuse(
                f"the entry {name} of its state_dict() is made by a hook or get_extra_state(), and is none of the "
                "model's tensors, so a worker cannot hold a part of it. Take parallel.kind=ddp, or a model without it"
            )


def refuse_lossy_copies(model: nn.Module) -> None:
    """Refuse a model whose own state_dict(), loaded again, fails or changes the model."""
    state = model.state_dict()
    if not copies_in(model, state):
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: int(digest([tensor])) for name, tensor in tensors.items()}
    try:
        model.load_state_dict(state)
    except Exception as error:
        what = " ".join(str(error).split())
        _refuse(f"load_state_dict() does not take its own state_dict(), so no checkpoint can be loaded: {what}")
    for name, tensor in tensors.items():
        if int(digest([tensor])) != before[name]:
            _refuse(
                f"its state_dict(), loaded again, changes {name}, so a resumed run would differ. The hook of the "
                "state_dict() must keep all bits, and load_state_dict() must undo the hook"
            )


def _unknown_type(tensor: Tensor) -> str:
    """Return why a checkpoint cannot hold a tensor of this type, "" if it can."""
    if is_lazy(tensor):
        return (
            "is not initialized, as in a lazy layer: give the layer its sizes, or run one forward where the model is "
            "built"
        )
    if tensor.layout != torch.strided:
        return f"is sparse ({tensor.layout}), which checkpoints cannot hold: make it dense, or build it in the forward"
    if tensor.dtype in DTYPE_NAMES:
        return ""
    what = f"is {str(tensor.dtype).removeprefix('torch.')}, a type that checkpoints cannot hold: "
    if tensor.is_complex():
        what += "keep it as torch.view_as_real of it and use torch.view_as_complex in the forward; "
    return f"{what}a constant may be a buffer with persistent=False"


def _is_empty(value: object) -> bool:
    if isinstance(value, io.BytesIO):
        return not value.getbuffer().nbytes
    return value is None or (isinstance(value, bytes | str | dict | list | tuple) and not value)


def _described(model: nn.Module, name: str) -> str:
    kind = type(model.get_submodule(name)).__name__
    return f"{name} ({kind})" if name else kind


def _refuse(what: str) -> NoReturn:
    raise ConfigError([Problem("", "model", what)])
