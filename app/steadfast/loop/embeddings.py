"""Table of the embeddings of one step, gathered from all ranks."""

from typing import Any

import torch
from torch import Tensor

from steadfast.data.batches import map_tensors, tensors_of
from steadfast.errors import UsageError
from steadfast.world.groups import Groups


class Embeddings:
    """Table of a step's embeddings, one row for each sample.

    Rows are in the order of the grid, and each rank fills the rows of its own samples.

    Args:
        num_rows: samples of the step, of all ranks together.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._structure: Any = None  # an example of embeddings, for the containers of their tensors
        self.tensors: list[Tensor] = []  # (num_rows, ...) each, in full precision

    def put(self, embeddings: Any, first_row: int, num_samples: int, weight: int) -> None:
        """Write the embeddings of some samples into their rows.

        Args:
            weight: 0 for samples that only define the shape of the rows and are not written.

        Raises:
            UsageError: a tensor has no row for each sample, or its rows differ in shape from earlier rows.
        """
        found = list(tensors_of(embeddings))
        for tensor in found:
            if not tensor.dim() or len(tensor) != num_samples:
                raise UsageError(
                    f"the task's embed returned a tensor of shape {tuple(tensor.shape)} for a batch of {num_samples} "
                    "samples; it must have a row for each sample (one number of the whole batch: .expand(num_samples))"
                )
        if self._structure is None:
            self._structure = embeddings
            self.tensors = [
                tensor.new_zeros(self._num_rows, *tensor.shape[1:], dtype=_sent(tensor)) for tensor in found
            ]
        for table, tensor in zip(self.tensors, found, strict=True):
            if table.shape[1:] != tensor.shape[1:]:
                raise UsageError(
                    f"the task's embed returned rows of shape {tuple(tensor.shape[1:])} after rows of shape "
                    f"{tuple(table.shape[1:])}; all samples need rows of one shape"
                )
            if weight:
                table[first_row : first_row + num_samples] = tensor

    def gather(self, groups: Groups) -> Any:
        """Return the embeddings of all ranks, in the containers of `put`. A collective.

        Raises:
            PeerLost: the world has been aborted.
        """
        for table in self.tensors:
            if table.is_floating_point():
                table.add_(0.0)  # turns -0.0 into 0.0 on one rank too, as the sum over several ranks does
            groups.communicator.sum(table)
        # After an abort the table may hold garbage, and labels out of range would end a process on a GPU.
        groups.gate()
        whole = iter(self.tensors)
        restored: list[Tensor] = []
        for given in tensors_of(self._structure):
            table = next(whole)
            # Booleans are summed as bytes.
            if given.dtype == torch.bool:
                table = table.bool()
            restored.append(table)
        self.tensors = restored
        each = iter(restored)
        return map_tensors(lambda _: next(each), self._structure)


def _sent(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which rows are gathered."""
    # 16 bits would round the gradient of the loss.
    if tensor.dtype == torch.bool:
        return torch.uint8
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return torch.float32
    return tensor.dtype
