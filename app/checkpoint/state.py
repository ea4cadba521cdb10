"""The state of a training run: two named parts, tensors only, whatever the strategy that holds them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

Tensors = dict[str, Any]


def app_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensors]:
    """Live references under the model's own parameter names, so loading in place is loading.

    The optimizer's hyperparameters are left out: they come from the configuration, which may change on resume.
    The order of the data, dropout, learning rate and loss scale all follow from the step and need no state.
    """
    _materialize(optimizer)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "model": model.state_dict(),
        "optimizer": {names[parameter]: tensors for parameter, tensors in optimizer.state.items()},
    }


def _materialize(optimizer: torch.optim.Optimizer) -> None:
    """Makes the optimizer create its state, which it otherwise does in its first step: one step that changes nothing,
    and whose count is taken back."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()


def flatten(state: Tensors, prefix: str = "") -> dict[str, Tensor]:
    """`{"a": {"b": t}}` as `{"a.b": t}`, in name order."""
    flat: dict[str, Tensor] = {}
    for name in sorted(state):
        value = state[name]
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            flat[f"{prefix}{name}"] = value
    return flat


def unsharded(tensor: Tensor) -> Tensor:
    """All of a tensor. A collective for a DTensor, whose module takes a second to import: hence not `isinstance`."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def sha256(state: Tensors) -> str:
    """The digest of all tensors, unsharded, in name order. A collective where tensors are sharded."""
    digest = hashlib.sha256()
    for name, tensor in flatten(state).items():
        digest.update(name.encode())
        digest.update(unsharded(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
