"""Tensors that are spread over ranks."""

from torch import Tensor


def unsharded(tensor: Tensor) -> Tensor:
    """Return all of a tensor. A collective for a DTensor."""
    # Not `isinstance`: DTensor's module takes a second to import.
    if not hasattr(tensor, "full_tensor"):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole
