"""Digest of tensors, computed on their device, to compare two ranks."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

# Number of words at a time. Widening all words to 64 bits at once would take twice the memory of the gradients.
_CHUNK = 1 << 18
# Word types by element size. Not 64 bits: with odd weights, two flips of the highest bit would cancel, because the sum
# of two odd numbers is even.
_WORDS = {1: torch.uint8, 2: torch.int16}
_WORD = torch.int32
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as int64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """Return a digest of contiguous tensors, () int64, without a wait.

    All tensors are on one device. Any difference in a single word is detected. Of all other differences about one in
    2^32 is missed.
    """
    # Words are multiplied by an odd number that depends on their position and added modulo 2^64; chunks are combined by
    # Horner's rule with an odd factor. Multiplication by an odd number is a bijection modulo 2^64, so a difference in a
    # single word cannot vanish. Integer arithmetic makes the digest independent of order and device.
    total: Tensor | None = None
    for tensor in tensors:
        words = tensor.detach().reshape(-1).view(_WORDS.get(tensor.element_size(), _WORD))
        weights = _weights(tensor.device)
        for chunk in words.split(_CHUNK):
            added = (chunk * weights[: len(chunk)]).sum()
            total = added if total is None else total * _GOLDEN_GAMMA + added
    return torch.zeros((), dtype=torch.int64) if total is None else total


def sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of a tensor's 64-bit words modulo 2^64, signed, at the speed of memory."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    end = len(data) // 8 * 8
    total = data[end:].sum(dtype=torch.int64)
    for chunk in data[:end].split(8 * _CHUNK):
        aligned = chunk.clone() if chunk.storage_offset() % 8 else chunk
        total += aligned.view(torch.int64).sum()
    return int(total)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return an odd hash of each position in a chunk, (_CHUNK,) int64.

    The hashes are equal on all devices.
    """
    weights = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _GOLDEN_GAMMA
    weights = (weights ^ (weights >> 31)) * _MIX
    return (weights ^ (weights >> 29)) | 1
