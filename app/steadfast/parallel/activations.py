"""Activation checkpointing: the backward computes a layer's activations again.

Random numbers of torch's generators, such as dropout's, are the same both times.
"""

from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from steadfast.config import ActivationCheckpointing
from steadfast.errors import UsageError
from steadfast.parallel.blocks import blocks_of, stop_caching

_KEY = "memory.activation_checkpointing"
_aten = torch.ops.aten
# Operations that are expensive to repeat for the memory of their results.
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
    """Let a model's repeated layers keep only their inputs for the backward.

    With "selective" they also keep matrix products and attention.

    Raises:
        UsageError: no repeated layers are found, or other code has replaced a layer's forward.
    """
    if how == "none":
        return
    blocks = blocks_of(model)
    if not blocks:
        raise UsageError(f"{_KEY}={how}: no repeated layers are found; give the model a method blocks()")
    # Otherwise each layer would enter its keys and values into the cache twice.
    stop_caching(model)
    every = how if isinstance(how, int) else 1
    forward = _kept_in_part if how == "selective" else _kept_nowhere
    for block in blocks[::every]:
        if "forward" in vars(block):
            raise UsageError(f"{_KEY}={how}: the forward of a {type(block).__name__} has been replaced; use none")
        # A bound method, which a copy of the model binds to the copied layer. A wrapper would change parameters' names.
        block.forward = MethodType(forward, block)


def refuse_parts_of_layers(layers: Sequence[nn.Module]) -> None:
    """Raise UsageError for layers with separately gathered parts, under "selective"."""
    from torch.distributed.fsdp import FSDPModule  # the import takes a second, and only sharded models need it

    for layer in layers:
        for name, part in layer.named_modules():
            if part is not layer and isinstance(part, FSDPModule):
                # Kept results are found by their index among all operations of the layer. In the backward different
                # operations gather the part, which shifts the index.
                raise UsageError(
                    f"{_KEY}=selective: parallel.wrap gathers {name}, a part of a layer, by itself, and then the kept "
                    "results of the layer are not found again; take full, or parallel.wrap=blocks"
                )


def _kept_nowhere(block: nn.Module, *args: Any, **named: Any) -> Any:
    return checkpoint(partial(type(block).forward, block), *args, use_reentrant=False, **named)


def _kept_in_part(block: nn.Module, *args: Any, **named: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _KEPT)
    return checkpoint(partial(type(block).forward, block), *args, use_reentrant=False, context_fn=contexts, **named)
