"""Microbatches in parts, for forwards that hold fewer samples than a microbatch has."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from app.data.batches import Batch, map_parts, tensors_of
from app.data.loader import Fetched
from app.errors import TrainingError
from app.plan import Microbatch


class Part(NamedTuple):
    """What one forward computes of a microbatch."""

    microbatch: Microbatch
    batch: Batch
    first: int  # index in the microbatch of its first sample
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
        yield Part(microbatch, fetched.batch, 0, num_samples, 1.0, microbatch.weight)
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
        rows = rows_of(fetched.batch, range(start, stop), num_samples)
        yield Part(microbatch._replace(weight=weight), rows, start, size, size / num_samples, weight)


def rows_of(batch: Batch, indices: Sequence[int], num_samples: int) -> Batch:
    """Return the samples of a batch at `indices`, of a batch that `uncuttable` finds no fault with.

    Args:
        num_samples: in the batch. A list of as many values that are no tensors, names say, is cut too.
    """
    if isinstance(batch, list) and len(batch) == num_samples and not any(True for _ in tensors_of(batch)):
        return [batch[index] for index in indices]
    if isinstance(batch, Mapping):
        return {key: rows_of(value, indices, num_samples) for key, value in batch.items()}
    if isinstance(batch, Tensor) and isinstance(indices, range):
        return batch[indices.start : indices.stop]  # a view
    if isinstance(batch, Tensor):
        return batch[torch.tensor(indices, device=batch.device)]
    return map_parts(lambda part: rows_of(part, indices, num_samples), batch)


def uncuttable(batch: Batch, num_samples: int) -> Tensor | None:
    """Return a tensor of a batch that has no row for each of its samples, None if all have."""
    for tensor in tensors_of(batch):
        if not tensor.dim() or len(tensor) != num_samples:
            return tensor
    return None


def _check_is_cut_by_sample(batch: Batch, num_samples: int) -> None:
    tensor = uncuttable(batch, num_samples)
    if tensor is not None:
        raise TrainingError(
            f"memory has run out, and a batch of {num_samples} samples cannot be run in parts: data.collate has "
            f"made a tensor of shape {tuple(tensor.shape)} of them. Lower batch.microbatch_size"
        )
