"""Buffers of a model that a forward changes, such as the running statistics of normalization layers."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class Buffers:
    """The buffers that belong to a model's state; others, such as masks and tables, never change."""

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict()
        self._buffers = [buffer for name, buffer in model.named_buffers() if name in state]

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Give the buffers back what they held before, if what is done within fails."""
        before = [buffer.clone() for buffer in self._buffers]
        try:
            yield
        except BaseException:
            self._put_back(before)
            raise

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Give the buffers back what they held before."""
        before = [buffer.clone() for buffer in self._buffers]
        yield
        self._put_back(before)

    def _put_back(self, before: list[Tensor]) -> None:
        for buffer, earlier in zip(self._buffers, before, strict=True):
            buffer.copy_(earlier)
