"""Microbatches in parts, for forwards that hold fewer samples than a microbatch has."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from app.data.batches import Batch, map_tensors, tensors_of
from app.data.loader import Fetched
from app.errors import TrainingError
from app.plan import Microbatch


class Part(NamedTuple):
    """What one forward computes of a microbatch."""

    microbatch: Microbatch
    batch: Batch
    num_samples: int
    share: float  # of the microbatch's samples
    weight: int  # 0 for one that counts for nothing, and keeps a rank in step with the others' collectives


def split(fetched: Fetched, forward_size: int | None, num_parts: int) -> Iterator[Part]:
    """Yield so many parts of a microbatch, each of up to `forward_size` samples; one part if that is None.

    Those beyond its samples repeat the first part, with weight 0.

    Raises:
        TrainingError: `data.collate` has made a batch that cannot be cut between samples.
    """
    microbatch = fetched.microbatch
    num_samples = microbatch.stop - microbatch.start
    if forward_size is None or (num_parts == 1 and num_samples <= forward_size):
        yield Part(microbatch, fetched.batch, num_samples, 1.0, microbatch.weight)
        return
    _check_is_cut_by_sample(fetched.batch, num_samples)
    for number in range(num_parts):
        start = number * forward_size
        counts = start < num_samples
        if not counts:
            start = 0
        stop = min(start + forward_size, num_samples)
        size = stop - start
        weight = microbatch.weight if counts else 0
        yield Part(
            microbatch._replace(weight=weight), _rows(fetched.batch, start, stop), size, size / num_samples, weight
        )


def _rows(batch: Batch, start: int, stop: int) -> Batch:
    def rows(tensor: Tensor) -> Tensor:
        return tensor[start:stop]

    return map_tensors(rows, batch)


def _check_is_cut_by_sample(batch: Batch, num_samples: int) -> None:
    for tensor in tensors_of(batch):
        if not tensor.dim() or len(tensor) != num_samples:
            raise TrainingError(
                f"memory has run out, and a batch of {num_samples} samples cannot be run in parts: data.collate has "
                f"made a tensor of shape {tuple(tensor.shape)} of them. Lower batch.microbatch_size"
            )
