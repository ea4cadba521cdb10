"""Copy batches to the device of the computation."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from steadfast.data.batches import Batch, map_tensors, tensors_of


class Copies(Protocol):
    """Function that copies a batch to the device of the computation."""

    def __call__(self, batch: Batch) -> Batch: ...


def build_copies(device: torch.device, dtype: torch.dtype) -> Copies:
    """Return the function that copies batches to a device.

    Floating point tensors become `dtype`.
    """

    def copy(tensor: Tensor) -> Tensor:
        # With pinned memory, which loaders use for a GPU, the host does not wait for the copy.
        wanted = dtype if tensor.is_floating_point() else None
        return tensor.to(device, wanted, non_blocking=True)

    if device.type == "cuda":
        return StreamCopies(device, copy)
    return partial(map_tensors, copy)


class StreamCopies:
    """Copy batches to a GPU on a separate stream.

    The copies do not wait for the microbatches that the GPU computes. Not run on a GPU yet.
    """

    def __init__(self, device: torch.device, copy: Callable[[Tensor], Tensor]) -> None:
        self._copy = copy
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Batch) -> Batch:
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            copied = map_tensors(self._copy, batch)
        computing.wait_stream(self._stream)  # makes the device wait, but not the host
        for tensor in tensors_of(copied):
            # The memory belongs to the copying stream. Without this call the allocator would regard the memory as free
            # after the host's last reference, and give it to the next batch while the device still computes.
            tensor.record_stream(computing)
        return copied
