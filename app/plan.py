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

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

Shares = tuple[int, ...]  # microbatches of each rank in a step


class Microbatch(NamedTuple):
    """Positions [start, stop) of the stream. A pad (weight 0) is one real sample that counts for nothing: it keeps a
    rank in step with collectives when it has nothing of its own to compute."""

    step: int
    index: int  # type: ignore[assignment]  # hides a method of tuple that nobody calls here
    start: int
    stop: int
    weight: int = 1


def even_shares(num_microbatches: int, world_size: int) -> Shares:
    """As equal as whole microbatches allow; the first ranks take the remainder."""
    each, left = divmod(num_microbatches, world_size)
    return tuple(each + (rank < left) for rank in range(world_size))


def fastest_shares(speeds: Sequence[float], num_microbatches: int) -> Shares:
    """The shares whose slowest rank is done first, at least one for each rank; even ones where there are not enough.

    Every microbatch goes to the rank that would be done with it first (D'Hondt's highest averages). No other shares
    end sooner; largest remainders may, by giving a slow rank the microbatch that all others then wait for.
    """
    if num_microbatches <= len(speeds):
        return even_shares(num_microbatches, len(speeds))
    shares = [1] * len(speeds)
    done = [(2 / speed, rank) for rank, speed in enumerate(speeds)]  # when a rank would be, with one more
    heapq.heapify(done)
    for _ in range(num_microbatches - len(speeds)):
        rank = done[0][1]
        shares[rank] += 1
        heapq.heapreplace(done, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


@dataclass
class Plan:
    """An assignment of every step's microbatches to ranks. Shares may change from a step on, as long as nobody has read
    that step yet; whoever changes them does so on all ranks alike.

    Args:
        global_size: samples in a step, whatever the world.
        microbatch_size: samples in a microbatch; the last one of a step may be shorter.
        shares: microbatches for each rank in the first step; their sum is the size of the grid.
        lockstep: every rank runs the same number of forwards (parallelisms whose forward is a collective).
        num_samples: where the stream ends, None for an endless one; the last step may then be short.
        skip: steps that are left out; their positions belong to nobody.
    """

    global_size: int
    microbatch_size: int
    shares: Shares
    lockstep: bool = False
    num_samples: int | None = None
    skip: frozenset[int] = frozenset()
    _changes: list[tuple[int, Shares]] = field(default_factory=list, init=False)  # oldest first
    _read: int = field(default=0, init=False)  # the last step that a stream has given out

    def __post_init__(self) -> None:
        self._check(self.shares)

    def _check(self, shares: Shares) -> None:
        grid = -(-self.global_size // self.microbatch_size)
        if len(shares) != len(self.shares) or sum(shares) != grid or min(shares) < 0:
            raise ValueError(f"shares {shares} do not cover a grid of {grid} microbatches")

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

    def change(self, first_step: int, shares: Shares) -> None:
        """Other shares from `first_step` on, which is beyond all earlier changes.

        Raises:
            ValueError: they do not cover the grid, or a loader has read `first_step` already.
        """
        self._check(shares)
        if first_step <= self._read:
            raise ValueError(f"shares cannot change from step {first_step} on: step {self._read} has been read")
        self._changes.append((first_step, shares))

    def shares_at(self, step: int) -> Shares:
        """The shares in force in `step`."""
        return next((shares for first, shares in reversed(self._changes) if first <= step), self.shares)

    def num_forwards(self, step: int, rank: int) -> int:
        """Forward passes of one rank in a step, pads included; at least one, or its peers would wait for ever."""
        shares = self.shares_at(step)
        return max(shares) if self.lockstep else max(1, shares[rank])

    def microbatches(self, step: int, rank: int) -> list[Microbatch]:
        """What `rank` runs in `step`, in order."""
        shares = self.shares_at(step)
        first = list(accumulate(shares, initial=0))[rank]
        real = [self._microbatch(step, index) for index in range(first, first + shares[rank])]
        pads = [self._pad(step, first + shares[rank])] * (self.num_forwards(step, rank) - len(real))
        return real + pads

    def stream(self, rank: int, first_step: int, last_step: int) -> Iterator[Microbatch]:
        """Everything `rank` runs from `first_step` to `last_step`, both included, less what is left out. Each step is
        read when it is asked for, with the shares that it has by then."""
        for step in range(first_step, last_step + 1):
            self._read = step
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
