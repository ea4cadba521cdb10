"""Flip single bits in what a microbatch is computed with and comes to, as broken memory or processors do."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from app.config.faults import FlipAt
from app.data.batches import tensors_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    """Flip one bit of a tensor in place, behind autograd's back. Both numbers are counted on from 0 at the end."""
    if not tensor.numel():
        return
    width = 8 * tensor.element_size()
    # `data`, as what is flipped may be needed by a backward, which would refuse a tensor that was changed openly.
    place = tensor.data
    for size, at in zip(place.shape, _unravelled(element % place.numel(), place.shape), strict=True):
        assert at < size
        place = place[at]
    bits = place.view(_INTEGERS[tensor.element_size()])
    bit %= width
    bits.bitwise_xor_(-(2 ** (width - 1)) if bit == width - 1 else 2**bit)  # the highest bit is the integer's sign


def _unravelled(index: int, shape: torch.Size) -> list[int]:
    places = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        places.append(place)
    return places[::-1]


class Flips:
    """Has flips strike in the forward and backward that follow, each once."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def strike(self, fault: FlipAt, model: nn.Module) -> None:
        """Flip a bit now, or as soon as what it is a bit of has been computed."""
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
        """Take back what has been announced, and not struck: a layer or parameter that was not used."""
        while self._handles:
            self._handles.pop().remove()

    def _strike_activation(self, fault: FlipAt, model: nn.Module) -> None:
        layers = [module for module in model.modules() if not any(module.children())]
        chosen = layers[fault.element % len(layers)]

        def flip(module: nn.Module, inputs: Any, output: Any) -> None:
            handle.remove()  # once: a layer may run again, in the backward too
            floating = [tensor for tensor in tensors_of(output) if tensor.is_floating_point()]
            if floating:
                flip_bit(floating[0], fault.element // len(layers), fault.bit)

        handle = chosen.register_forward_hook(flip)
        self._handles.append(handle)

    def _strike_gradient(self, fault: FlipAt, model: nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        chosen = trained[fault.element % len(trained)]

        # Before it is added to what is in the bucket, which may travel as soon as it is.
        def flip(gradient: Tensor) -> Tensor:
            handle.remove()
            flipped = gradient.clone()
            flip_bit(flipped, fault.element // len(trained), fault.bit)
            return flipped

        handle = chosen.register_hook(flip)
        self._handles.append(handle)
