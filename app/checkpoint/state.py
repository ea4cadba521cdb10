"""The state of a training run: two named parts, tensors only, whatever the strategy that holds them."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

Tensors = dict[str, Any]


def app_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensors]:
    """Live references under the model's own parameter names, so loading in place is loading.

    The optimizer's hyperparameters are left out: they come from the configuration, which may change on resume.
    The order of the data, dropout, learning rate and loss scale all follow from the step and need no state.
    """
    optimizer_state: Any = get_optimizer_state_dict(model, optimizer)["state"]
    return {"model": get_model_state_dict(model), "optimizer": optimizer_state}


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


def sha256(state: Tensors) -> str:
    """The digest of all tensors, unsharded, in name order. A collective where tensors are sharded."""
    digest = hashlib.sha256()
    for name, tensor in flatten(state).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode())
        digest.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
