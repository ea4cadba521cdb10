"""Split microbatches into parts for forwards with fewer samples."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steadfast.data.batches import Batch, map_parts, tensors_of
from steadfast.data.loader import Fetched
from steadfast.errors import TrainingError
from steadfast.plan import Microbatch


class Part(NamedTuple):
    """Samples of a microbatch that one forward computes."""

    microbatch: Microbatch
    batch: Batch
    first: int  # index of the part's first sample in the microbatch
    num_samples: int
    share: float  # share of the microbatch's samples
    weight: int  # 0 for a part without effect, which keeps the ranks' collectives in step


def split(fetched: Fetched, forward_size: int, num_parts: int) -> Iterator[Part]:
    """Yield the parts of a microbatch, each with up to `forward_size` samples.

    Parts beyond the samples repeat the first part, with weight 0.

    Raises:
        TrainingError: `data.collate` made a batch that cannot be cut between samples.
    """
    microbatch = fetched.microbatch
    num_samples = microbatch.stop - microbatch.start
    if num_parts == 1 and num_samples <= forward_size:
        yield Part(microbatch, fetched.batch, 0, num_samples, 1.0, microbatch.weight)
        return
    _check_is_cut_by_sample(fetched.batch, num_samples)
    for number in range(num_parts):
        start = number * forward_size
        weight = microbatch.weight
        if start >= num_samples:
            # All ranks must run as many forwards, because a forward or backward may contain collectives.
            start = 0
            weight = 0
        stop = min(start + forward_size, num_samples)
        size = stop - start
        rows = rows_of(fetched.batch, range(start, stop), num_samples)
        yield Part(microbatch._replace(weight=weight), rows, start, size, size / num_samples, weight)


def rows_of(batch: Batch, indices: Sequence[int], num_samples: int) -> Batch:
    """Return the samples of a batch at `indices`.

    `uncuttable` must return None for the batch.

    Args:
        num_samples: number of samples in the batch. A list with as many values that are no tensors is cut too.
    """
    # `stack` makes a list of values that are no tensors, such as texts, with one value for each sample.
    if isinstance(batch, list) and len(batch) == num_samples and next(tensors_of(batch), None) is None:
        return [batch[index] for index in indices]
    if isinstance(batch, Mapping):
        return {key: rows_of(value, indices, num_samples) for key, value in batch.items()}
    if isinstance(batch, Tensor) and isinstance(indices, range):
        return batch[indices.start : indices.stop]  # a view, without a copy
    if isinstance(batch, Tensor):
        return batch[torch.tensor(indices, device=batch.device)]
    return map_parts(lambda part: rows_of(part, indices, num_samples), batch)


def uncuttable(batch: Batch, num_samples: int) -> Tensor | None:
    """Return a tensor that has no row for each sample, None without one."""
    for tensor in tensors_of(batch):
        if not tensor.dim() or len(tensor) != num_samples:
            return tensor
    return None


def _check_is_cut_by_sample(batch: Batch, num_samples: int) -> None:
    tensor = uncuttable(batch, num_samples)
    if tensor is not None:
        raise TrainingError(
            f"memory has run out, and a batch of {num_samples} samples cannot be split into parts: data.collate has "
            f"made a tensor of shape {tuple(tensor.shape)} from the samples. Lower batch.microbatch_size"
        )
