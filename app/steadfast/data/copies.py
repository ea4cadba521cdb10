"""Copy batches to a GPU."""

import torch
from torch import Tensor

from steadfast.data.batches import Batch, map_tensors, tensors_of


class StreamCopies:
    """Copy batches to a GPU on a separate stream.

    Floating point tensors become `dtype`. The copies do not wait for the microbatches that the GPU computes. Not run on
    a GPU yet.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
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

    def _copy(self, tensor: Tensor) -> Tensor:
        # With pinned memory, which loaders use for a GPU, the host does not wait for the copy.
        wanted = self._dtype if tensor.is_floating_point() else None
        return tensor.to(self._device, wanted, non_blocking=True)
