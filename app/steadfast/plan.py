"""Assign microbatches to workers.

The module is pure arithmetic, and the only place in which world size and shares enter. A rank here is a place on the
data axes of the world (`World.data_rank`): ranks that together compute the same samples have one place.

Theorem. The training samples are one endless stream of positions. Each step is the next global_size positions of the
stream, or the remaining positions if the run ends. A run that is extended continues after the last position. So steps 1
to s (counted from 1) are a partition of the stream up to that position: every position is in exactly one step. A step
is cut into a fixed grid of microbatches, and its gradient is

    sum over the grid of (gradient of the microbatch's loss sum)  /  (global count of the step).

Neither the steps, the grid nor the count depend on the ranks that compute them. So the result does not depend on the
world size, on the shares, on restarts, or on the time of their changes, except for the order of floating point sums.

The theorem does not hold if samples are coupled beyond their microbatch (SyncBatchNorm), if randomness is keyed by rank
or by wall time, if a mean is taken before the sum over ranks, or if `microbatch_size` changes together with dropout,
which then draws other numbers, or with statistics of a microbatch (BatchNorm, whose running statistics are also such a
sum).

`EvenSamplesPlan` cuts the last microbatches of the grid differently in each world. The sum stays the same if the loss
of a microbatch is the sum of the losses of its samples, and nothing is drawn or measured for a microbatch as a whole.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

Shares = tuple[int, ...]  # number of microbatches of each rank in a step


class Microbatch(NamedTuple):
    """Positions [start, stop) of the stream."""

    step: int
    index: int  # type: ignore[assignment]  # hides a method of tuple that is never called here
    start: int
    stop: int
    # A pad has weight 0: its samples are real, but have no effect. It keeps a rank without work in step with its peers'
    # collectives.
    weight: int = 1


class End(NamedTuple):
    """Short step with which the run once ended, before the run was extended.

    A short step has fewer samples than the global batch. `position` is the position after the last sample of `step`.
    """

    step: int
    position: int


@dataclass(frozen=True)
class Amendments:
    """Changes to the plan from events of the run so far.

    Every rank of a world has the same amendments.
    """

    skip: frozenset[int] = frozenset()  # steps that are skipped, because their numbers were bad
    ends: tuple[End, ...] = ()  # short steps with which the run once ended, oldest first
    forward_size: int | None = None  # most samples of a forward, None for a whole microbatch

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Self:
        """Read the amendments from the result of `to_line`."""
        return cls(frozenset(line["skip"]), tuple(map(End._make, line["ends"])), line["forward_size"])

    def to_line(self) -> dict[str, Any]:
        """Return the amendments as a JSON object."""
        return {"skip": sorted(self.skip), "ends": self.ends, "forward_size": self.forward_size}

    def leaving_out(self, steps: Iterable[int]) -> Self:
        """Return these amendments with more steps to skip."""
        return replace(self, skip=self.skip | set(steps))


def begin_of(step: int, global_size: int, ends: Sequence[End] = ()) -> int:
    """Return the first position of a step.

    `ends` are the short steps with which the run once ended, oldest first.
    """
    last = End(0, 0)  # last end before the step
    for end in ends:
        if end.step < step:
            last = end
    return last.position + (step - last.step - 1) * global_size


def step_of(position: int, global_size: int, ends: Sequence[End] = ()) -> int:
    """Return the step of a position in the stream.

    `ends` are the short steps with which the run once ended, oldest first.
    """
    last = End(0, 0)  # last end up to the position
    for end in ends:
        if end.position <= position:
            last = end
    return last.step + 1 + (position - last.position) // global_size


def even_shares(num_microbatches: int, world_size: int) -> Shares:
    """Return shares that differ by at most one microbatch.

    The first ranks take the remainder.
    """
    each, remainder = divmod(num_microbatches, world_size)
    return (each + 1,) * remainder + (each,) * (world_size - remainder)


def fastest_shares(speeds: Sequence[float], num_microbatches: int, shard_size: int = 1) -> Shares:
    """Return the shares with the shortest step at given speeds.

    Every rank gets at least one microbatch, if there are enough.

    Args:
        speeds: relative speed of each replica.
        shard_size: number of neighbouring ranks that share their parameters, and run equally many forwards.
    """
    if shard_size > 1:
        # A row is the microbatches that a replica runs at once, one per rank.
        rows = fastest_shares(speeds, _ceil_div(num_microbatches, shard_size))
        sizes = [shard_size * num for num in rows]
        # The grid may not fill its last row. The replica with the most rows gets the short one.
        sizes[sizes.index(max(sizes))] -= sum(sizes) - num_microbatches
        shares_of_ranks: list[int] = []
        for size in sizes:
            shares_of_ranks += even_shares(size, shard_size)
        return tuple(shares_of_ranks)
    if num_microbatches <= len(speeds):
        return even_shares(num_microbatches, len(speeds))
    # Every microbatch goes to the rank that would finish it first (D'Hondt's highest averages). Largest remainders
    # could give a slow rank the one microbatch that all other ranks then wait for.
    shares = [1] * len(speeds)
    # time at which each rank would finish one more microbatch
    next_done = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(next_done)
    for _ in range(num_microbatches - len(speeds)):
        _, rank = next_done[0]
        shares[rank] += 1
        heapq.heapreplace(next_done, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


def largest_microbatch(global_size: int, num_workers: int, num_fitting: int) -> int:
    """Return the number of samples in a microbatch.

    Each worker must have a microbatch, and at most `num_fitting` samples fit.
    """
    limit = max(1, min(global_size // num_workers, num_fitting))
    # With a divisor no microbatch is short.
    divisor = limit
    while global_size % divisor:
        divisor -= 1
    # But a prime number has no fitting divisor except 1, so a power of two may be better.
    if 2 * divisor <= limit:
        return 1 << (limit.bit_length() - 1)
    return divisor


@dataclass
class Plan:
    """Assignment of every step's microbatches to ranks."""

    global_size: int  # samples in a step, for any world
    microbatch_size: int  # samples in a microbatch; the last microbatch of a step may have fewer
    shares: Shares  # of the first step; the sum is the size of the grid
    # Number of neighbouring ranks that share their parameters. Their forwards are collectives, so each runs equally
    # many.
    shard_size: int = 1
    num_samples: int | None = None  # length of the stream, None for an endless stream; the last step may then be short
    skip: frozenset[int] = frozenset()  # skipped steps, whose positions no rank runs
    ends: tuple[End, ...] = ()  # short steps with which the run once ended, oldest first; these steps stay short
    _changes: list[tuple[int, Shares]] = field(default_factory=list, init=False)  # (first step, shares), oldest first
    _last_read: int = field(default=0, init=False)  # last step that a stream has yielded

    def __post_init__(self) -> None:
        self._check(self.shares)

    @classmethod
    def even(
        cls,
        global_size: int,
        microbatch_size: int,
        world_size: int,
        shard_size: int = 1,
        num_samples: int | None = None,
    ) -> Self:
        """Return a plan with even shares."""
        shares = even_shares(_ceil_div(global_size, microbatch_size), world_size)
        return cls(global_size, microbatch_size, shares, shard_size, num_samples)

    def amended(self, amendments: Amendments) -> Self:
        """Return this plan with the skipped and short steps of the amendments."""
        return replace(self, skip=amendments.skip, ends=amendments.ends)

    def change(self, first_step: int, shares: Shares) -> None:
        """Change the shares from `first_step` on, on all ranks alike.

        Raises ValueError if that step has been read.
        """
        self._check(shares)
        # A loader may already have fetched these microbatches under the old shares. Some microbatches would run twice,
        # and others never.
        if first_step <= self._last_read:
            raise ValueError(f"shares cannot change from step {first_step} on: step {self._last_read} has been read")
        self._changes.append((first_step, shares))

    def shares_at(self, step: int) -> Shares:
        """Return the shares of `step`."""
        for first_step, shares in reversed(self._changes):
            if first_step <= step:
                return shares
        return self.shares

    def parts(self, step: int) -> Shares:
        """Return how many samples each rank's part of a microbatch has, () if all are whole."""
        return ()

    def first_unread(self, step: int, num_ahead: int) -> int:
        """Return the first step after `step` that no loader has read.

        Each loader may be `num_ahead` microbatches ahead.
        """
        # The same number of microbatches is more steps for a rank with fewer microbatches, so the smallest share
        # counts.
        smallest = max(1, min(self.shares_at(step + 1)))
        num_steps_ahead = _ceil_div(num_ahead, smallest)
        last_read = step
        while num_steps_ahead > 0:
            last_read += 1
            if last_read not in self.skip:
                num_steps_ahead -= 1
        return last_read + 1

    def num_forwards(self, step: int, rank: int) -> int:
        """Return the number of forwards of `rank` in `step`, including pads."""
        first = rank - rank % self.shard_size  # first rank of the replica
        # At least one forward: a rank without one would not join the gradients' all-reduce, and its peers would hang.
        return max(1, *self.shares_at(step)[first : first + self.shard_size])

    def microbatches(self, step: int, rank: int) -> list[Microbatch]:
        """Return the microbatches of `rank` in `step`, in order."""
        shares = self.shares_at(step)
        first = sum(shares[:rank])
        stop = first + shares[rank]
        share = [self._microbatch(step, index) for index in range(first, stop)]
        num_pads = self.num_forwards(step, rank) - len(share)
        return share + [self._pad(step)] * num_pads

    def stream(self, rank: int, first_step: int, last_step: int) -> Iterator[Microbatch]:
        """Yield the microbatches of `rank` from `first_step` to `last_step`.

        Both steps are included, and skipped steps are left out.
        """
        for step in range(first_step, last_step + 1):
            # This is set before the shares are read, because from now on the step's shares may not change.
            self._last_read = step
            if step not in self.skip:
                yield from self.microbatches(step, rank)

    @property
    def last_step(self) -> int:
        """Return the last step of a stream with an end."""
        assert self.num_samples is not None
        return step_of(self.num_samples - 1, self.global_size, self.ends)

    @property
    def grid_size(self) -> int:
        """Return the number of microbatches in a whole step, for any world."""
        return _ceil_div(self.global_size, self.microbatch_size)

    def num_samples_in(self, step: int) -> int:
        """Return the number of samples of all ranks in `step`.

        A step has global_size samples, or fewer at an end of the run.
        """
        start, stop = self.positions(step)
        return stop - start

    def num_microbatches_in(self, step: int) -> int:
        """Return the number of microbatches of all ranks, without pads."""
        return _ceil_div(self.num_samples_in(step), self.microbatch_size)

    def positions(self, step: int) -> tuple[int, int]:
        """Return the positions [start, stop) of `step` in the stream."""
        begin = begin_of(step, self.global_size, self.ends)
        for end in self.ends:
            if end.step == step:
                return begin, end.position
        stop = begin + self.global_size
        if self.num_samples is not None:
            stop = min(stop, self.num_samples)
        return begin, stop

    def _microbatch(self, step: int, index: int) -> Microbatch:
        begin, end = self.positions(step)
        start = begin + index * self.microbatch_size
        stop = min(start + self.microbatch_size, end)
        # The last step before an end has fewer samples than fit into the grid.
        if start >= stop:
            return self._pad(step)
        return Microbatch(step, index, start, stop)

    def _pad(self, step: int) -> Microbatch:
        # A pad repeats the step's first microbatch, which even a short step has. A single sample would satisfy the
        # collectives, but not a model with statistics of its batch, or code compiled for one shape. A pad costs no
        # time, because other ranks run a microbatch meanwhile.
        begin, end = self.positions(step)
        # The pad has the first microbatch's index, so that it draws the same random numbers. So a pad uses no parameter
        # of the model that the first microbatch does not use.
        return Microbatch(step, 0, begin, min(begin + self.microbatch_size, end), weight=0)

    def _check(self, shares: Shares) -> None:
        if len(shares) != len(self.shares) or sum(shares) != self.grid_size or min(shares) < 0:
            raise ValueError(f"shares {shares} do not cover a grid of {self.grid_size} microbatches")


class EvenSamplesPlan(Plan):
    """Plan in which the samples of ranks differ by at most one.

    If the number of ranks does not divide a step's microbatches, those left over are cut by sample into one part for
    each rank. A part counts as a microbatch with a number of its own. It may have samples of two neighbouring
    microbatches of the grid, because a second forward would take longer than one with more samples.
    """

    def shares_at(self, step: int) -> Shares:
        """Return the shares of `step`, parts included."""
        each = self._num_whole(step) // len(self.shares)
        return tuple(each + min(1, size) for size in self.parts(step))

    def parts(self, step: int) -> Shares:
        """Return how many samples the part of each rank has, 0 for none."""
        num_left = self.num_samples_in(step) - self._num_whole(step) * self.microbatch_size
        # Below 0 if the step's last microbatch is short, and no microbatch is left over.
        return even_shares(max(0, num_left), len(self.shares))

    def num_microbatches_in(self, step: int) -> int:
        """Return the number of microbatches of all ranks, parts included, without pads."""
        return sum(self.shares_at(step))

    def microbatches(self, step: int, rank: int) -> list[Microbatch]:
        """Return the microbatches of `rank` in `step`, in order."""
        each = self._num_whole(step) // len(self.shares)
        whole = [self._microbatch(step, index) for index in range(rank * each, (rank + 1) * each)]
        # The part comes first, because the sum of gradients over ranks overlaps with the last backward, and is hidden
        # best by a long one.
        return [self._part(step, rank)] * (self.num_forwards(step, rank) - each) + whole

    def _num_whole(self, step: int) -> int:
        """Return how many microbatches of the grid are not cut in `step`, of all ranks."""
        num_microbatches = super().num_microbatches_in(step)
        return num_microbatches - num_microbatches % len(self.shares)

    def _part(self, step: int, rank: int) -> Microbatch:
        sizes = self.parts(step)
        begin, _ = self.positions(step)
        if not sizes[rank]:
            # A pad as long as a whole microbatch would take longer than the other ranks' parts.
            return Microbatch(step, 0, begin, begin + max(sizes), weight=0)
        num_whole = self._num_whole(step)
        start = begin + num_whole * self.microbatch_size + sum(sizes[:rank])
        return Microbatch(step, num_whole + rank, start, start + sizes[rank])


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
