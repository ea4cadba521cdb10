"""A digest of the bits of tensors, computed where they are, by which two ranks can tell whether they hold the same."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 1 << 20  # words at a time: they are widened to 64 bits, and a model's gradients would take twice their room
# By element size. Never 64 bits: there two flips of the highest one would cancel, whatever the weights, since the sum
# of two odd numbers is even.
_WORDS = {1: torch.uint8, 2: torch.int16}
_WORD = torch.int32
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as int64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return a digest of the bits of contiguous tensors of one device, () int64. The host does not wait for it.

    Words are added up modulo 2^64, each times an odd number of its place, and chunks by Horner's rule with an odd
    factor. Multiplication by an odd number is a bijection there, so a single word that differs in any way always shows;
    of any other difference about one in 2^32 does not. All of it is integer arithmetic: no order and no device changes
    it.
    """
    total: Tensor | None = None
    for tensor in tensors:
        words = tensor.detach().reshape(-1).view(_WORDS.get(tensor.element_size(), _WORD))
        weights = _weights(tensor.device)
        for chunk in words.split(_CHUNK):
            added = (chunk * weights[: len(chunk)]).sum()
            total = added if total is None else total * _GOLDEN_GAMMA + added
    return torch.zeros((), dtype=torch.int64) if total is None else total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return an odd number for each place in a chunk, (_CHUNK,) int64; a hash of the place, the same on all devices."""
    weights = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _GOLDEN_GAMMA
    weights = (weights ^ (weights >> 31)) * _MIX
    return (weights ^ (weights >> 29)) | 1
