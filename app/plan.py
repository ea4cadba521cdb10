"""Assign microbatches to workers. Pure arithmetic: the one place where world size and shares enter.

Theorem. The training samples form one endless stream of positions. Each step is the global_size positions behind those
of the step before, or as many as are left where the run ends; a run that is extended goes on behind the last of them.
So steps 1 to s (counted from 1) are a partition of the stream up to there: no position is left out, and none comes
twice. A step is cut into a fixed grid of microbatches, and its gradient is

    sum over the grid of (gradient of the microbatch's loss sum)  /  (global count of the step).

Neither the steps, the grid nor the count mention who computed what, so the result does not depend on the world size,
on the shares, on restarts, or on when any of them changed, except for the order in which floating point sums are taken.

What breaks it: anything that couples samples beyond their microbatch (SyncBatchNorm), randomness keyed by rank or by
wall time, a mean taken before the sum over ranks, or another `microbatch_size` together with dropout (another draw) or
with statistics of a microbatch (BatchNorm, whose running ones are such a sum too).
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Self

Shares = tuple[int, ...]  # microbatches of each rank in a step


class Microbatch(NamedTuple):
    """Positions [start, stop) of the stream."""

    step: int
    index: int  # type: ignore[assignment]  # hides a method of tuple that nobody calls here
    start: int
    stop: int
    # A pad has weight 0: real samples that count for nothing. It keeps a rank in step with its peers' collectives when
    # it has nothing of its own to compute.
    weight: int = 1


class End(NamedTuple):
    """An earlier end of the run, which has cut a step short: `position` is the one behind the last sample of `step`."""

    step: int
    position: int


@dataclass(frozen=True)
class Amendments:
    """What has come up in the run so far that its plan goes by from then on. Every rank of a world has the same."""

    skip: frozenset[int] = frozenset()  # steps that are left out, because their numbers were bad
    ends: tuple[End, ...] = ()  # where the run ended before it was extended, oldest first
    forward_size: int | None = None  # samples that a forward may have, None for those of a microbatch

    @classmethod
    def of_line(cls, line: dict[str, Any]) -> Self:
        """Read what `to_line` has made."""
        return cls(frozenset(line["skip"]), tuple(End(*end) for end in line["ends"]), line["forward_size"])

    def to_line(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {"skip": sorted(self.skip), "ends": self.ends, "forward_size": self.forward_size}

    def leaving_out(self, steps: Iterable[int]) -> Self:
        """Return these with more steps to skip."""
        return replace(self, skip=self.skip | set(steps))


def begin_of(step: int, global_size: int, ends: Sequence[End] = ()) -> int:
    """Return the first position of a step. `ends` are the earlier ends of the run, oldest first."""
    last = End(0, 0)  # the newest one before the step
    for end in ends:
        if end.step < step:
            last = end
    return last.position + (step - last.step - 1) * global_size


def step_of(position: int, global_size: int, ends: Sequence[End] = ()) -> int:
    """Return the step that a position of the stream is in. `ends` are the earlier ends of the run, oldest first."""
    last = End(0, 0)  # the newest one up to the position
    for end in ends:
        if end.position <= position:
            last = end
    return last.step + 1 + (position - last.position) // global_size


def even_shares(num_microbatches: int, world_size: int) -> Shares:
    """Return shares as equal as whole microbatches allow; the first ranks take the remainder."""
    each, remainder = divmod(num_microbatches, world_size)
    return (each + 1,) * remainder + (each,) * (world_size - remainder)


def fastest_shares(speeds: Sequence[float], num_microbatches: int, shard: int = 1) -> Shares:
    """Return the shares with which a step ends soonest, given relative speeds; at least one for each rank.

    Args:
        speeds: of each replica.
        shard: how many neighbouring ranks are a replica, and run as many forwards each.
    """
    if shard > 1:
        # By rows: what a replica runs at once.
        rows = fastest_shares(speeds, _ceil_div(num_microbatches, shard))
        sizes = [shard * num for num in rows]
        sizes[sizes.index(max(sizes))] -= sum(sizes) - num_microbatches
        return tuple(chain.from_iterable(even_shares(size, shard) for size in sizes))
    if num_microbatches <= len(speeds):
        return even_shares(num_microbatches, len(speeds))
    # Every microbatch goes to the rank that would be done with it first (D'Hondt's highest averages). Not by largest
    # remainders: they may give a slow rank the one microbatch that all others then wait for.
    shares = [1] * len(speeds)
    next_done = [(2 / speed, rank) for rank, speed in enumerate(speeds)]  # when each would be done with one more
    heapq.heapify(next_done)
    for _ in range(num_microbatches - len(speeds)):
        _, rank = next_done[0]
        shares[rank] += 1
        heapq.heapreplace(next_done, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


def largest_microbatch(global_size: int, num_workers: int, num_fitting: int) -> int:
    """Return how many samples to put into a microbatch, where `num_fitting` fit and each worker is to have one."""
    limit = max(1, min(global_size // num_workers, num_fitting))
    divisor = max(size for size in range(1, limit + 1) if global_size % size == 0)
    # Of a divisor no microbatch is short. But of a prime number the only one that fits is 1.
    return divisor if 2 * divisor > limit else 1 << (limit.bit_length() - 1)


@dataclass
class Plan:
    """An assignment of every step's microbatches to ranks."""

    global_size: int  # samples in a step, whatever the world
    microbatch_size: int  # samples in a microbatch; the last one of a step may be shorter
    shares: Shares  # of the first step; their sum is the size of the grid
    # So many neighbouring ranks hold one model among them: their forwards are collectives, so each runs as many.
    shard: int = 1
    num_samples: int | None = None  # where the stream ends, None for an endless one; the last step may then be short
    skip: frozenset[int] = frozenset()  # steps that are left out; no rank runs their positions
    ends: tuple[End, ...] = ()  # where the run ended before it was extended, oldest first; these steps stay short
    _changes: list[tuple[int, Shares]] = field(default_factory=list, init=False)  # (first step, shares), oldest first
    _last_read: int = field(default=0, init=False)  # the last step that a stream has given out

    def __post_init__(self) -> None:
        self._check(self.shares)

    @classmethod
    def even(
        cls,
        global_size: int,
        microbatch_size: int,
        world_size: int,
        shard: int = 1,
        *,
        num_samples: int | None = None,
        skip: frozenset[int] = frozenset(),
        ends: tuple[End, ...] = (),
    ) -> Self:
        """Make a plan with even shares."""
        num_microbatches = _ceil_div(global_size, microbatch_size)
        shares = even_shares(num_microbatches, world_size)
        return cls(global_size, microbatch_size, shares, shard, num_samples, skip, ends)

    def change(self, first_step: int, shares: Shares) -> None:
        """Set other shares from `first_step` on, on all ranks alike. Raises ValueError if that step has been read."""
        self._check(shares)
        # A loader may have fetched these microbatches for another rank already; some would be run twice, others never.
        if first_step <= self._last_read:
            raise ValueError(f"shares cannot change from step {first_step} on: step {self._last_read} has been read")
        self._changes.append((first_step, shares))

    def shares_at(self, step: int) -> Shares:
        """Return the shares in force in `step`."""
        for first_step, shares in reversed(self._changes):
            if first_step <= step:
                return shares
        return self.shares

    def first_unread(self, step: int, num_ahead: int) -> int:
        """Return the first step after `step` that no loader has read, if each is `num_ahead` microbatches ahead."""
        # The same number of microbatches is more steps to a rank with a smaller share: the smallest is the farthest.
        smallest = max(1, min(self.shares_at(step + 1)))
        num_steps_ahead = _ceil_div(num_ahead, smallest)
        last_read = step
        while num_steps_ahead > 0:
            last_read += 1
            if last_read not in self.skip:
                num_steps_ahead -= 1
        return last_read + 1

    def num_forwards(self, step: int, rank: int) -> int:
        """Return the number of forward passes of `rank` in `step`, pads included."""
        first = rank - rank % self.shard  # of those that it holds a model with
        # At least one: a rank that runs nothing would not join the gradients' all-reduce, and its peers would hang.
        return max(1, *self.shares_at(step)[first : first + self.shard])

    def microbatches(self, step: int, rank: int) -> list[Microbatch]:
        """Return what `rank` runs in `step`, in order."""
        shares = self.shares_at(step)
        first = sum(shares[:rank])
        stop = first + shares[rank]
        share = [self._microbatch(step, index) for index in range(first, stop)]
        num_pads = self.num_forwards(step, rank) - len(share)
        return share + [self._pad(step)] * num_pads

    def stream(self, rank: int, first_step: int, last_step: int) -> Iterator[Microbatch]:
        """Yield all that `rank` runs from `first_step` to `last_step`, both included, without the steps to skip."""
        for step in range(first_step, last_step + 1):
            # Noted before the shares are looked up: from here on they may not change for this step.
            self._last_read = step
            if step not in self.skip:
                yield from self.microbatches(step, rank)

    @property
    def last_step(self) -> int:
        """Return the step of the last sample of a stream that ends."""
        assert self.num_samples is not None
        return step_of(self.num_samples - 1, self.global_size, self.ends)

    def num_samples_in(self, step: int) -> int:
        """Return the samples of all ranks in `step`: global_size, or fewer where the run ends, or has ended once."""
        start, stop = self.positions(step)
        return stop - start

    def num_microbatches_in(self, step: int) -> int:
        """Return the microbatches of all ranks in `step`, without pads."""
        return _ceil_div(self.num_samples_in(step), self.microbatch_size)

    def positions(self, step: int) -> tuple[int, int]:
        """Return the positions [start, stop) of the stream that all ranks together run in `step`."""
        begin = begin_of(step, self.global_size, self.ends)
        for end in self.ends:
            if end.step == step:
                return begin, end.position
        stop = begin + self.global_size
        return begin, stop if self.num_samples is None else min(stop, self.num_samples)

    def _microbatch(self, step: int, index: int) -> Microbatch:
        begin, end = self.positions(step)
        start = begin + index * self.microbatch_size
        stop = min(start + self.microbatch_size, end)
        # The last step before an end has fewer samples than the grid has room for.
        if start >= stop:
            return self._pad(step)
        return Microbatch(step, index, start, stop)

    def _pad(self, step: int) -> Microbatch:
        # A pad replays the step's first microbatch, which a short step has too. A single sample would satisfy the
        # collectives, but not a model that takes statistics of its batch, nor code compiled for one shape. A pad costs
        # no time, as other ranks run a microbatch meanwhile.
        begin, end = self.positions(step)
        # Under the first microbatch's index the replay draws the same random numbers. So a pad uses no parameter of the
        # model that the first microbatch itself does not use.
        return Microbatch(step, 0, begin, min(begin + self.microbatch_size, end), weight=0)

    def _check(self, shares: Shares) -> None:
        num_microbatches = _ceil_div(self.global_size, self.microbatch_size)
        if len(shares) != len(self.shares) or sum(shares) != num_microbatches or min(shares) < 0:
            raise ValueError(f"shares {shares} do not cover a grid of {num_microbatches} microbatches")


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
