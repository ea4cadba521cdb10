"""Layouts of a world: numbers of ranks on each axis."""

from collections.abc import Iterable
from typing import NamedTuple


class Layout(NamedTuple):
    """Sizes of the axes of a world, replicate x stage x shard x tensor."""

    replicate: int
    stages: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def replica_size(self) -> int:
        """Return the number of ranks that together hold one model."""
        return self.stages * self.shard * self.tensor

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.replicate * self.replica_size

    @property
    def data_size(self) -> int:
        """Return the number of ranks that compute different samples."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        """Return the sizes of the axes that have several ranks, as "2 x 8"."""
        return " x ".join(map(str, [self.replicate, *[size for size in self[1:] if size > 1]]))


def layout_of_most(num_workers: int, replicas: Iterable[Layout]) -> Layout:
    """Return the layout of whole replicas that has most of the workers.

    Of equally large ones it is that with the smallest replicas, which exchange the least. If each replica has more
    workers, the layout has no ranks.

    Args:
        replicas: possible layouts of one replica.
    """
    best = Layout(0)
    for replica in sorted(replicas, key=lambda layout: layout.replica_size):
        found = replica._replace(replicate=num_workers // replica.replica_size)
        if found.size > best.size:
            best = found
    return best
