"""Recognize the data that a run was trained on."""

import hashlib
import time
from collections.abc import Callable

import torch
from torch import Tensor

from steadfast.data.batches import layout_of, leaves_of, stack
from steadfast.data.datasets import Dataset
from steadfast.data.randomness import own_randomness

LAYOUT = "layout "  # begins the fingerprint of a dataset whose samples differ each time they are read
_FORMER_LENGTH = 16  # of the fingerprints of former versions, which cover the first and the last sample
_AGAIN_S = 0.2  # time for reading samples again, of which two are read in any case


def fingerprint(dataset: Dataset, reads: Callable[[int], object] = int, num_samples: int = 12) -> str:
    """Return a text that identifies a dataset by samples at equal distances, and by its digest if any.

    `reads` is called with the index of each sample before the sample is read.
    """
    # Resuming with other data would break the order of samples. Reading the whole dataset would take hours.
    sources = getattr(dataset, "sources", None)
    if sources is not None:
        marks = [fingerprint(source, reads, max(3, num_samples // len(sources))) for source in sources]
        kind = LAYOUT if any(mark.startswith(LAYOUT) for mark in marks) else ""
        return kind + _digest(" ".join(mark[:_FORMER_LENGTH] for mark in marks)) + _digest(*marks)
    size = f"{len(dataset)}{getattr(dataset, 'digest', '')}"
    if hasattr(dataset, "digest"):
        num_samples = 2  # a sample of a shard may take a hundred megabytes to read
    indices = sorted({(len(dataset) - 1) * number // (num_samples - 1) for number in range(num_samples)})
    samples = [_read(dataset, index, reads) for index in indices]
    until_s = time.monotonic() + _AGAIN_S
    for number, (index, sample) in enumerate(zip(indices, samples, strict=True)):
        if not getattr(dataset, "is_augmented", True) or (number >= 2 and time.monotonic() > until_s):
            break
        if _read(dataset, index, reads) != sample:
            return LAYOUT + _digest(size, *sorted(set.intersection(*[layout for *_, layout in samples])))
    (first, *_), (last, *_) = samples[0], samples[-1]
    return _digest(size, first, last) + _digest(*[part for *parts, _ in samples for part in parts])


def is_same_data(stored: str, own: str) -> bool:
    """Return whether a checkpoint's fingerprint is that of this process's data."""
    if len(stored) == _FORMER_LENGTH:
        # A former version read a sample once, so its fingerprint of a dataset that draws by itself says nothing.
        return own.startswith((stored, LAYOUT))
    return stored == own


def _read(dataset: Dataset, index: int, reads: Callable[[int], object]) -> tuple[bytes, bytes, set[str]]:
    """Return the bytes of a sample's tensors, those of its texts and images, and its layout."""
    # Without a seed, a dataset with random augmentation would return another sample each time.
    reads(index)
    with own_randomness(0):
        try:
            sample = dataset[index]
            leaves = list(leaves_of(stack([sample])))
        except Exception as error:
            if index in (0, len(dataset) - 1):
                raise
            # An order of the user's own may leave out what cannot be read.
            return b"", type(error).__name__.encode(), set()
    tensors = [leaf.contiguous().view(-1).view(torch.uint8).numpy().data for leaf in leaves if isinstance(leaf, Tensor)]
    others: list[bytes] = []
    for leaf in leaves:
        if isinstance(leaf, str | bytes | int | float):
            others.append(repr(leaf).encode())
        elif hasattr(leaf, "tobytes"):  # an image of Pillow
            others.append(leaf.tobytes())
    return b"".join(tensors), b"".join(others), set(map(str, layout_of(sample)))


def _digest(*parts: str | bytes) -> str:
    whole = b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)
    return hashlib.sha256(whole).hexdigest()[:_FORMER_LENGTH]
