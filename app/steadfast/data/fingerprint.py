"""Recognize the data that a run was trained on."""

import hashlib
import time
from typing import Any

import torch
from torch import Tensor

from steadfast.data.batches import layout_of, leaves_of, stack, tensors_of
from steadfast.data.datasets import Dataset
from steadfast.data.randomness import own_randomness

LAYOUT = "layout "  # begins the fingerprint of a dataset whose samples differ each time they are read
_FORMER_LENGTH = 16  # of the fingerprints of former versions, which cover the first and the last sample
_AGAIN_S = 0.2  # time for reading samples again, of which two are read in any case


def fingerprint(dataset: Dataset, num_samples: int = 12) -> str:
    """Return a text that identifies a dataset by samples at equal distances, and by its digest if any."""
    # Resuming with other data would break the order of samples. Reading the whole dataset would take hours.
    sources = getattr(dataset, "sources", None)
    if sources is not None:
        marks = [fingerprint(source, max(3, num_samples // len(sources))) for source in sources]
        kind = LAYOUT if any(mark.startswith(LAYOUT) for mark in marks) else ""
        return kind + _digest(" ".join(mark[:_FORMER_LENGTH] for mark in marks).encode(), *map(str.encode, marks))
    size = f"{len(dataset)}{getattr(dataset, 'digest', '')}".encode()
    if hasattr(dataset, "digest"):
        num_samples = 2  # a sample of a shard may take a hundred megabytes to read
    last = len(dataset) - 1
    samples: dict[int, Any] = dict.fromkeys(last * number // (num_samples - 1) for number in range(num_samples))
    for index in samples:
        samples[index] = _read(dataset, index)
    until_s = time.monotonic() + _AGAIN_S
    for number, (index, sample) in enumerate(samples.items()):
        if not getattr(dataset, "is_augmented", True) or (number >= 2 and time.monotonic() > until_s):
            break
        if _content(_read(dataset, index)) != _content(sample):
            layouts = [set(map(str, layout_of(each))) for each in samples.values()]
            return LAYOUT + _digest(size, " ".join(sorted(set.intersection(*layouts))).encode())
    ends = [_bytes_of(tensor) for index in (0, last) for tensor in tensors_of(stack([samples[index]]))]
    return _digest(size + b"".join(ends), *map(_content, samples.values()))


def is_same_data(stored: str, own: str) -> bool:
    """Return whether a checkpoint's fingerprint is that of this process's data."""
    if len(stored) == _FORMER_LENGTH:
        # A former version read a sample once, so its fingerprint of a dataset that draws by itself says nothing.
        return own.startswith((stored, LAYOUT))
    return stored == own


def _read(dataset: Dataset, index: int) -> Any:
    # Without a seed, a dataset with random augmentation would return another sample each time.
    with own_randomness(0):
        try:
            return dataset[index]
        except Exception as error:
            if index in (0, len(dataset) - 1):
                raise
            return type(error).__name__  # an order of the user's own may leave out what cannot be read


def _content(sample: Any) -> bytes:
    return hashlib.sha256(b"".join(map(_bytes_of, leaves_of(stack([sample]))))).digest()


def _bytes_of(leaf: Any) -> bytes:
    match leaf:
        case Tensor():
            return leaf.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        case str() | bytes() | int() | float():
            return repr(leaf).encode()
    return leaf.tobytes() if hasattr(leaf, "tobytes") else b""  # images of Pillow have this method


def _digest(former: bytes, *others: bytes) -> str:
    return "".join(hashlib.sha256(part).hexdigest()[:_FORMER_LENGTH] for part in (former, b"".join(others)))
