"""Bring batches to the device that computes with them."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from app.data.batches import Batch, map_tensors, tensors_of


class Copies(Protocol):
    """Copies a batch to where it is computed with."""

    def __call__(self, batch: Batch) -> Batch: ...


def build_copies(device: torch.device, dtype: torch.dtype) -> Copies:
    """Return what copies batches to a device. Floating point tensors become `dtype` on the way."""

    def copy(tensor: Tensor) -> Tensor:
        # From pinned memory, as loaders give it for a GPU, the host does not wait for a copy.
        return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)

    return StreamCopies(device, copy) if device.type == "cuda" else lambda batch: map_tensors(copy, batch)


class StreamCopies:
    """The `Copies` of a GPU: on a stream of their own, so that they need not wait for microbatches under way there.

    Never run on a GPU yet.
    """

    def __init__(self, device: torch.device, copy: Callable[[Tensor], Tensor]) -> None:
        self._copy = copy
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: Batch) -> Batch:
        computing = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            copied = map_tensors(self._copy, batch)
        computing.wait_stream(self._stream)  # the device waits, the host does not
        for tensor in tensors_of(copied):
            # Or its memory, which is the copying stream's, would be given to the next batch while this one is still
            # computed with: to the allocator a tensor that the host has let go of is free.
            tensor.record_stream(computing)
        return copied
