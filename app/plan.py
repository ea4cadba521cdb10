"""Which worker runs which microbatch. Pure arithmetic: the one place where world size and shares enter.

Theorem. The training samples form one endless stream of positions. Step s (counted from 1) is the positions
[(s - 1) * global_size, s * global_size), cut into a fixed grid of microbatches, and its gradient is

    sum over the grid of (gradient of the microbatch's loss sum)  /  (global count of the step).

Neither the grid nor the count mentions who computed what, so the result does not depend on the world size, on the
shares, on restarts, or on when any of them changed, except for the order in which floating point sums are taken.

What breaks it: anything that couples samples beyond their microbatch (BatchNorm), randomness keyed by rank or by
wall time, a mean taken before the sum over ranks, or another `microbatch_size` together with dropout (another draw).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Microbatch(NamedTuple):
    """Positions [start, stop) of the stream. A pad (weight 0) is one real sample that counts for nothing: it keeps a
    rank in step with collectives when it has nothing of its own to compute."""

    step: int
    index: int  # type: ignore[assignment]  # hides a method of tuple that nobody calls here
    start: int
    stop: int
    weight: int = 1


def even_shares(num_microbatches: int, world_size: int) -> tuple[int, ...]:
    """As equal as whole microbatches allow; the first ranks take the remainder."""
    each, left = divmod(num_microbatches, world_size)
    return tuple(each + (rank < left) for rank in range(world_size))


@dataclass(frozen=True)
class Plan:
    """An assignment of every step's microbatches to ranks.

    Args:
        global_size: samples in a step, whatever the world.
        microbatch_size: samples in a microbatch; the last one of a step may be shorter.
        shares: microbatches for each rank; their sum is the size of the grid.
        lockstep: every rank runs the same number of forwards (parallelisms whose forward is a collective).
        num_samples: where the stream ends, None for an endless one; the last step may then be short.
        skip: steps that are left out; their positions belong to nobody.
    """

    global_size: int
    microbatch_size: int
    shares: tuple[int, ...]
    lockstep: bool = False
    num_samples: int | None = None
    skip: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        grid = -(-self.global_size // self.microbatch_size)
        if sum(self.shares) != grid or min(self.shares) < 0:
            raise ValueError(f"shares {self.shares} do not cover a grid of {grid} microbatches")

    @classmethod
    def even(
        cls,
        global_size: int,
        microbatch_size: int,
        world_size: int,
        *,
        lockstep: bool = False,
        num_samples: int | None = None,
        skip: frozenset[int] = frozenset(),
    ) -> Plan:
        shares = even_shares(-(-global_size // microbatch_size), world_size)
        return cls(global_size, microbatch_size, shares, lockstep, num_samples, skip)

    def num_forwards(self, rank: int) -> int:
        """Forward passes of one rank in every step, pads included; at least one, or its peers would wait for ever."""
        return max(self.shares) if self.lockstep else max(1, self.shares[rank])

    def microbatches(self, step: int, rank: int) -> list[Microbatch]:
        """What `rank` runs in `step`, in order."""
        first = list(accumulate(self.shares, initial=0))[rank]
        real = [self._microbatch(step, index) for index in range(first, first + self.shares[rank])]
        pads = [self._pad(step, first + self.shares[rank])] * (self.num_forwards(rank) - len(real))
        return real + pads

    def stream(self, rank: int, first_step: int, last_step: int) -> Iterator[Microbatch]:
        """Everything `rank` runs from `first_step` to `last_step`, both included, less what is left out."""
        for step in range(first_step, last_step + 1):
            if step not in self.skip:
                yield from self.microbatches(step, rank)

    def num_samples_in(self, step: int) -> int:
        """Samples of all ranks in `step`: global_size, less where the stream ends."""
        begin = (step - 1) * self.global_size
        return self.global_size if self.num_samples is None else min(self.global_size, self.num_samples - begin)

    def positions(self, step: int) -> tuple[int, int]:
        """[start, stop) of the stream, of all ranks in `step`."""
        begin = (step - 1) * self.global_size
        return begin, begin + self.num_samples_in(step)

    def _microbatch(self, step: int, index: int) -> Microbatch:
        begin = (step - 1) * self.global_size
        start = begin + index * self.microbatch_size
        stop = min(start + self.microbatch_size, begin + self.num_samples_in(step))
        return Microbatch(step, index, start, stop) if start < stop else self._pad(step, index)

    def _pad(self, step: int, index: int) -> Microbatch:
        begin = (step - 1) * self.global_size
        return Microbatch(step, index, begin, begin + 1, weight=0)
