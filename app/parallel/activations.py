"""Activation checkpointing: what a layer computes in its forward is thrown away, and computed again in its backward.

Dropout and whatever else is drawn from torch's generators is drawn alike both times.
"""

from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from app.config import ActivationCheckpointing
from app.errors import UsageError
from app.parallel.blocks import blocks_of, stop_caching

_KEY = "memory.activation_checkpointing"
_aten = torch.ops.aten
# What costs most to compute again for the memory that it takes.
_KEPT = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]


def checkpoint_activations(model: nn.Module, how: ActivationCheckpointing) -> None:
    """Have the repeated layers of a model keep their inputs alone; under "selective" also products and attention.

    Raises:
        UsageError: no repeated layers are found, or somebody else has changed how they are called.
    """
    if how == "none":
        return
    blocks = blocks_of(model)
    if not blocks:
        raise UsageError(f"{_KEY}={how}: no repeated layers are found; give the model a method blocks()")
    stop_caching(model)  # layers would fill the cache twice
    every = how if isinstance(how, int) else 1
    for block in blocks[::every]:
        if "forward" in vars(block):
            raise UsageError(f"{_KEY}={how}: the forward of a {type(block).__name__} has been replaced; use none")
        # A bound method, which a copy of the model binds to the layer's copy. No wrapper: names stay what they are.
        block.forward = MethodType(_kept_in_part if how == "selective" else _kept_nowhere, block)


def refuse_parts_of_layers(layers: Sequence[nn.Module]) -> None:
    """Raise UsageError for a layer that keeps products and attention, and parts of which fsdp gathers by themselves."""
    from torch.distributed.fsdp import FSDPModule  # takes a second to import, and sharded models alone need it

    for layer in layers:
        for name, part in layer.named_modules():
            if part is not layer and isinstance(part, FSDPModule):
                # What is kept is known by its place among all operations of the layer, and the second time, in the
                # backward, other ones gather the part.
                raise UsageError(
                    f"{_KEY}=selective: parallel.wrap gathers {name}, a part of a layer, by itself, and then what was "
                    "kept of the layer is not found again; take full, or parallel.wrap=blocks"
                )


def _kept_nowhere(block: nn.Module, *args: Any, **named: Any) -> Any:
    return checkpoint(partial(type(block).forward, block), *args, use_reentrant=False, **named)


def _kept_in_part(block: nn.Module, *args: Any, **named: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _KEPT)
    return checkpoint(partial(type(block).forward, block), *args, use_reentrant=False, context_fn=contexts, **named)
