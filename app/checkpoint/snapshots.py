"""Sharded state in the memory of other nodes: what a lost node took along, another one has.

Every so often each rank copies its shards and sends the copy to a rank of another node, while training goes on. Two
generations of copies are held, so one of them is complete whatever happens; they belong to the process, and outlive the
attempt. Replicated state needs none of this: every survivor has all of it. Whether a step was finite need not be known
of a copy: if it was not, it is left out from then on, and a state that it went into is not asked for any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from app.agree import any_rank
from app.checkpoint.shards import Filling, Staged, pieces_of, pieces_to_write
from app.checkpoint.state import Tensors
from app.groups import Groups
from app.runtime import World
from app.telemetry.narrate import size

_SHARE = 0.01  # of the time that copies may cost
_MEMORY_SHARE = 0.5  # of what is free, that all workers of a machine may take for them together


@dataclass(frozen=True, order=True)
class Generation:
    """Which copies belong together."""

    step: int
    attempt: int
    num_ranks: int


@dataclass
class Slot:
    """What one process holds of one generation.

    files: where in `received` the file of which rank lies. generation: None while it is not complete.
    """

    own: Staged = field(default_factory=Staged)
    received: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    rank: int = -1
    files: dict[int, slice] = field(default_factory=dict)
    generation: Generation | None = None
    skip: frozenset[int] = frozenset()

    def file(self, rank: int) -> Tensor:
        return self.own.file() if rank == self.rank else self.received[self.files[rank]]

    @property
    def ranks(self) -> list[int]:
        return [self.rank, *self.files]


class Shelf:
    """The two generations that a process holds."""

    def __init__(self) -> None:
        self.slots = (Slot(), Slot())

    def oldest(self) -> Slot:
        return min(self.slots, key=lambda slot: slot.generation.step if slot.generation else -1)

    def held(self, skip: frozenset[int]) -> dict[Generation, list[int]]:
        """Whose files are here. Those of other steps than are left in are of no use."""
        return {slot.generation: slot.ranks for slot in self.slots if slot.generation and slot.skip == skip}

    def find(self, generation: Generation) -> Slot:
        return next(slot for slot in self.slots if slot.generation == generation)


class Snapshots:
    """As one attempt sees them. The constructor and `take` are collectives.

    Args:
        num_bytes: of this rank's shards; None where there is nothing to copy: state that is replicated, or one rank.
        shelf: the process's own.

    step, num_bytes, stall_s: of the last copy of this rank's shards, and how long training waited for it.
    why_not: what keeps it from copying, if that is the machine.
    """

    def __init__(
        self, world: World, shelf: Shelf, num_bytes: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._world, self._shelf, self._clock = world, shelf, clock
        self._filling: Slot | None = None
        self._generation = Generation(0, 0, 0)
        self._work: dist.Work | None = None
        self._next_s, self._raised = -1.0, False
        self.step = self.num_bytes = 0
        self.stall_s, self.why_not = 0.0, ""
        self._on = num_bytes is not None and world.size > 1
        if not self._on:
            return
        nodes: list[str] = [""] * world.size
        dist.all_gather_object(nodes, world.node, group=world.groups.control)
        self._to = [keeper(rank, nodes) for rank in range(world.size)]
        needed, free = 4 * (num_bytes or 0) * nodes.count(world.node), psutil.virtual_memory().available
        if any_rank(needed > _MEMORY_SHARE * free, world.groups.control):
            self._on = False
            self.why_not = (
                f"copies of its shards need {size(needed)} of a node's memory, of which {size(free)} are free"
            )
            return
        self._group = world.groups.side_group()

    def wanted(self) -> bool:
        """Asked of the leader after every step: whether to take one now. Once until it has been taken."""
        self._receive()
        if self._raised or not self._on or self._work is not None or self._clock() < self._next_s:
            return False
        self._raised = True
        return True

    def take(self, step: int, state: dict[str, Tensors]) -> None:
        """Copies this rank's shards and sends the copy off. Left out while a rank still has to receive the last one."""
        began = self._clock()
        self._receive()
        self._raised = False
        if any_rank(self._work is not None, self._world.groups.control):
            return
        rank, num_ranks, slot = self._world.rank, self._world.size, self._shelf.oldest()
        slot.generation, slot.rank, slot.skip = None, rank, self._world.skip
        slot.own.fill(pieces_to_write(state, replicas=rank == 0))
        file = slot.own.file()
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(num_ranks)]
        dist.all_gather(lengths, torch.tensor([len(file)]), group=self._world.groups.control)
        incoming = [int(lengths[each]) if self._to[each] == rank else 0 for each in range(num_ranks)]
        slot.files, end = {}, 0
        for each, length in enumerate(incoming):
            if length:
                slot.files[each] = slice(end, end := end + length)
        if len(slot.received) < end:
            slot.received = torch.empty(end, dtype=torch.uint8)
        outgoing = [len(file) if each == self._to[rank] else 0 for each in range(num_ranks)]
        self._filling, self._generation = slot, Generation(step, self._world.attempt, num_ranks)
        self._work = dist.all_to_all_single(
            slot.received[:end], file, incoming, outgoing, group=self._group, async_op=True
        )
        self._world.groups.under_way.append(self._work)
        self.step, self.num_bytes, self.stall_s = step, len(file), self._clock() - began
        self._next_s = self._clock() + self.stall_s / _SHARE

    def _receive(self) -> None:
        if self._work is not None and self._work.is_completed():
            self._work.wait()
            self._world.groups.under_way.remove(self._work)
            assert self._filling
            self._filling.generation, self._work = self._generation, None


def keeper(rank: int, nodes: Sequence[str]) -> int:
    """The rank that holds the copy of `rank`: the next one on another node, or the next one where all are on one."""
    others = [(rank + ahead) % len(nodes) for ahead in range(1, len(nodes))]
    return next((other for other in others if nodes[other] != nodes[rank]), others[0])


def restore_snapshot(
    state: dict[str, Tensors], shelf: Shelf, skip: frozenset[int], committed: int, groups: Groups
) -> int | None:
    """Fills every rank's shards from the copies that the living hold; the step, or None where storage has a newer one.

    A collective. Each rank hears each file and takes its part of it, one file after the other.

    Args:
        committed: the newest checkpoint that this rank knows of.
    """
    said: list[tuple[int, dict[Generation, list[int]]]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(said, (committed, shelf.held(skip)), group=groups.control)
    newest = max((each for _, held in said for each in held if _is_complete(each, said)), default=None)
    if newest is None or newest.step < max(known for known, _ in said):
        return None
    filling = Filling(pieces_of(state))
    for rank in range(newest.num_ranks):
        source = next(index for index, (_, held) in enumerate(said) if rank in held.get(newest, []))
        file = shelf.find(newest).file(rank) if source == dist.get_rank() else None
        length = torch.tensor([0 if file is None else len(file)])
        groups.wait([dist.broadcast(length, source, async_op=True)])
        data = file if file is not None else torch.empty(int(length), dtype=torch.uint8)
        groups.wait([dist.broadcast(data, source, async_op=True)])
        filling.take(_InMemory(data), f"rank {rank}")
    filling.finish()
    return newest.step


def _is_complete(generation: Generation, said: Sequence[tuple[int, dict[Generation, list[int]]]]) -> bool:
    there = {rank for _, held in said for rank in held.get(generation, [])}
    return there == set(range(generation.num_ranks))


class _InMemory:
    """One file, whatever it is called."""

    def __init__(self, data: Tensor) -> None:
        self._data = memoryview(data.numpy().data)

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        return bytes(self._data[start : None if num_bytes is None else start + num_bytes])
