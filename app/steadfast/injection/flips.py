"""Flip single bits of tensors, as broken memory or processors do."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from steadfast.config.faults import FlipAt
from steadfast.data.batches import tensors_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of a tensor in place, unseen by autograd.

    Args:
        element: index of the number, modulo the size of the tensor.
        bit: index of the bit from the lowest, modulo the bits of a number.
    """
    if not tensor.numel():
        return
    width = 8 * tensor.element_size()
    # `data` hides the change from autograd, because a backward would refuse a saved tensor that was changed in place.
    place = tensor.data
    for size, at in zip(place.shape, _unravelled(element % place.numel(), place.shape), strict=True):
        assert at < size
        place = place[at]
    bits = place.view(_INTEGERS[tensor.element_size()])
    bit %= width
    mask = 2**bit
    if bit == width - 1:
        mask = -mask  # the sign bit alone is the smallest number of the type, and the positive number would overflow
    bits.bitwise_xor_(mask)


def _unravelled(index: int, shape: torch.Size) -> list[int]:
    places = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        places.append(place)
    return places[::-1]


class Flips:
    """Flips to apply once in the next forward and backward."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def strike(self, fault: FlipAt, model: nn.Module) -> None:
        """Flip a bit of a weight now, of a computed tensor later."""
        match fault.where:
            case "weight":
                parameters = list(model.parameters())
                chosen = parameters[fault.element % len(parameters)]
                flip_bit(chosen, fault.element // len(parameters), fault.bit)
            case "activation":
                self._strike_activation(fault, model)
            case "gradient":
                self._strike_gradient(fault, model)

    def forget(self) -> None:
        """Remove flips that have not struck."""
        # A flip stays pending if its layer or parameter was not used. It must not strike another microbatch.
        while self._handles:
            self._handles.pop().remove()

    def _strike_activation(self, fault: FlipAt, model: nn.Module) -> None:
        # A module with children computes through its children, so only modules without children are chosen.
        layers = [module for module in model.modules() if not any(module.children())]
        chosen = layers[fault.element % len(layers)]

        def flip(module: nn.Module, inputs: Any, output: Any) -> None:
            handle.remove()  # a layer may run again, even in the backward, and the flip must strike only once
            floating = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
            if floating:
                flip_bit(floating[0], fault.element // len(layers), fault.bit)

        handle = chosen.register_forward_hook(flip)
        self._handles.append(handle)

    def _strike_gradient(self, fault: FlipAt, model: nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        chosen = trained[fault.element % len(trained)]

        # A tensor hook runs before the gradient is added to the bucket. Later the bucket may already be on its way to
        # the other ranks.
        def flip(gradient: Tensor) -> Tensor:
            handle.remove()
            flipped = gradient.clone()
            flip_bit(flipped, fault.element // len(trained), fault.bit)
            return flipped

        handle = chosen.register_hook(flip)
        self._handles.append(handle)
