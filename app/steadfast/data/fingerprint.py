"""Recognize the data that a run was trained on."""

import hashlib
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadfast.data.batches import layout_of, leaves_of, stack
from steadfast.data.datasets import Dataset
from steadfast.data.randomness import own_randomness

LAYOUT = "layout "  # begins the fingerprint of a dataset whose samples differ each time they are read
_FORMER_LENGTH = 16  # of the fingerprints of former versions, which cover the first and the last sample
_AGAIN_S = 0.2  # time for reading samples again, of which two are read in any case


class _Sample(NamedTuple):
    tensors: bytes
    others: bytes  # texts and images
    layout: frozenset[str]  # names, types and shapes


def fingerprint(dataset: Dataset, num_samples: int = 12) -> str:
    """Return a text that identifies a dataset by samples at equal distances, and by its digest if any."""
    # Resuming with other data would break the order of samples. Reading the whole dataset would take hours.
    sources = getattr(dataset, "sources", None)
    if sources is not None:
        marks = [fingerprint(source, max(3, num_samples // len(sources))) for source in sources]
        kind = LAYOUT if any(mark.startswith(LAYOUT) for mark in marks) else ""
        return kind + _digest(" ".join(mark[:_FORMER_LENGTH] for mark in marks)) + _digest(*marks)
    size = f"{len(dataset)}{getattr(dataset, 'digest', '')}"
    if hasattr(dataset, "digest"):
        num_samples = 2  # a sample of a shard may take a hundred megabytes to read
    last = len(dataset) - 1
    indices = sorted({last * number // (num_samples - 1) for number in range(num_samples)})
    samples = [_read(dataset, index) for index in indices]
    until_s = time.monotonic() + _AGAIN_S
    for number, (index, sample) in enumerate(zip(indices, samples, strict=True)):
        if not getattr(dataset, "is_augmented", True) or (number >= 2 and time.monotonic() > until_s):
            break
        if _read(dataset, index) != sample:
            return LAYOUT + _digest(size, *sorted(frozenset.intersection(*[each.layout for each in samples])))
    former = _digest(size, samples[0].tensors, samples[-1].tensors)
    return former + _digest(*[part for each in samples for part in each[:2]])


def is_same_data(stored: str, own: str) -> bool:
    """Return whether a checkpoint's fingerprint is that of this process's data."""
    if len(stored) == _FORMER_LENGTH:
        # A former version read a sample once, so its fingerprint of a dataset that draws by itself says nothing.
        return own.startswith((stored, LAYOUT))
    return stored == own


def _read(dataset: Dataset, index: int) -> _Sample:
    # Without a seed, a dataset with random augmentation would return another sample each time.
    with own_randomness(0):
        try:
            sample = dataset[index]
            leaves = list(leaves_of(stack([sample])))
        except Exception as error:
            if index in (0, len(dataset) - 1):
                raise
            # An order of the user's own may leave out what cannot be read.
            return _Sample(b"", type(error).__name__.encode(), frozenset())
    tensors = [leaf.contiguous().view(-1).view(torch.uint8).numpy() for leaf in leaves if isinstance(leaf, Tensor)]
    others = [_bytes_of(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
    return _Sample(b"".join(tensors), b"".join(others), frozenset(map(str, layout_of(sample))))


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, str | bytes | int | float):
        return repr(leaf).encode()
    return leaf.tobytes() if hasattr(leaf, "tobytes") else b""  # images of Pillow have this method


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:_FORMER_LENGTH]
