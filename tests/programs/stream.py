"""Data that come as a stream."""

from collections.abc import Iterator

from torch import Tensor
from torch.utils.data import IterableDataset

from tests.programs import nadam
from tests.programs.nadam import Model, Task
from tests.programs.program import BOTH, Program

__all__ = ["Model", "Task"]


class Stream(IterableDataset[tuple[Tensor, ...]]):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        dataset = nadam.data()
        return (dataset[index] for index in range(len(dataset)))


data = Stream


PROGRAM = Program(
    __name__,
    "`IterableDataset`",
    refused=dict.fromkeys(BOTH, "a Stream, an IterableDataset: after a failure nothing records which"),
    advice="`steadfast index`, or a map-style dataset",
)
