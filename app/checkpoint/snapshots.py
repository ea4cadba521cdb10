"""Sharded state in the memory of other nodes: what a lost node took along, another one has.

Every so often each rank copies its shards and sends the copy to a rank of another node, while training goes on. Two
generations of copies are held, so one of them is complete whatever happens; they belong to the process, and outlive the
attempt. Replicated state needs none of this: every survivor has all of it. Whether a step was finite need not be known
of a copy: if it was not, it is left out from then on, and a state that it went into is not asked for any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from app.agree import any_rank
from app.checkpoint.shards import Filling, Read, Staged, pieces_of, pieces_to_write
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


Lengths = dict[Generation, dict[int, int]]  # of the files that a process holds, by rank


@dataclass
class Slot:
    """What one process holds of one generation.

    files: by rank, its own among them. generation: None while they are not complete.
    """

    own: Staged = field(default_factory=Staged)
    received: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    files: dict[int, Tensor] = field(default_factory=dict)
    generation: Generation | None = None
    skip: frozenset[int] = frozenset()


class Shelf:
    """The two generations that a process holds."""

    def __init__(self) -> None:
        self.slots = (Slot(), Slot())

    def oldest(self) -> Slot:
        return min(self.slots, key=lambda slot: slot.generation.step if slot.generation else -1)

    def held(self, skip: frozenset[int]) -> dict[Generation, dict[int, Tensor]]:
        """The files that are here, by rank. Those of other steps than are left in are of no use."""
        return {slot.generation: slot.files for slot in self.slots if slot.generation and slot.skip == skip}


class Snapshots:
    """As one attempt sees them. The constructor and `take` are collectives.

    Args:
        state: this rank's shards; None where there is nothing to copy: state that is replicated.
        shelf: the process's own.

    step, num_bytes, stall_s: of the last copy of this rank's shards, and how long training waited for it.
    why_not: what keeps it from copying, if that is the machine.
    """

    def __init__(self, world: World, shelf: Shelf, state: dict[str, Tensors] | None) -> None:
        self._world, self._shelf = world, shelf
        self._filling: Slot | None = None
        self._generation = Generation(0, 0, 0)
        self._work: dist.Work | None = None
        self._next_s, self._raised = -1.0, False
        self.step = self.num_bytes = 0
        self.stall_s, self.why_not = 0.0, ""
        self._on = False
        if state is None or world.size == 1:
            return
        nodes: list[str] = [""] * world.size
        dist.all_gather_object(nodes, world.node, group=world.groups.control)
        self._to = [keeper(rank, nodes) for rank in range(world.size)]
        num_bytes, free = sum(piece.num_bytes for piece in pieces_of(state)), psutil.virtual_memory().available
        needed = 4 * num_bytes * nodes.count(world.node)
        if any_rank(needed > _MEMORY_SHARE * free, world.groups.control):
            self.why_not = (
                f"copies of its shards need {size(needed)} of a node's memory, of which {size(free)} are free"
            )
            return
        self._on, self._group = True, world.groups.side_group()

    def wanted(self) -> bool:
        """Asked of the leader after every step: whether to take one now. Once until it has been taken."""
        self._receive()
        if self._raised or not self._on or self._work is not None or time.monotonic() < self._next_s:
            return False
        self._raised = True
        return True

    def take(self, step: int, state: dict[str, Tensors]) -> None:
        """Copies this rank's shards and sends the copy off. Left out while a rank still has to receive the last one."""
        began = time.monotonic()
        self._receive()
        self._raised = False
        if any_rank(self._work is not None, self._world.groups.control):
            return
        rank, num_ranks, slot = self._world.rank, self._world.size, self._shelf.oldest()
        slot.generation, slot.skip = None, self._world.skip
        slot.own.fill(pieces_to_write(state, replicas=rank == 0))
        file = slot.own.file()
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(num_ranks)]
        dist.all_gather(lengths, torch.tensor([len(file)]), group=self._world.groups.control)
        incoming = [int(lengths[each]) if self._to[each] == rank else 0 for each in range(num_ranks)]
        if len(slot.received) < sum(incoming):
            slot.received = torch.empty(sum(incoming), dtype=torch.uint8)
        received = slot.received[: sum(incoming)]
        slot.files = {each: part for each, part in enumerate(received.split(incoming)) if len(part)} | {rank: file}
        outgoing = [len(file) if each == self._to[rank] else 0 for each in range(num_ranks)]
        self._filling, self._generation = slot, Generation(step, self._world.attempt, num_ranks)
        self._work = dist.all_to_all_single(received, file, incoming, outgoing, group=self._group, async_op=True)
        self._world.groups.under_way.append(self._work)
        self.step, self.num_bytes, self.stall_s = step, len(file), time.monotonic() - began
        self._next_s = time.monotonic() + self.stall_s / _SHARE

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
    held = shelf.held(skip)
    lengths = {generation: {rank: len(file) for rank, file in files.items()} for generation, files in held.items()}
    said: list[tuple[int, Lengths]] = [(0, {})] * dist.get_world_size()
    dist.all_gather_object(said, (committed, lengths), group=groups.control)
    newest = max((each for _, known in said for each in known if _is_complete(each, said)), default=None)
    if newest is None or newest.step < max(committed for committed, _ in said):
        return None
    filling = Filling(pieces_of(state))
    for rank in range(newest.num_ranks):
        source = next(index for index, (_, known) in enumerate(said) if rank in known.get(newest, ()))
        mine, length = source == dist.get_rank(), said[source][1][newest][rank]
        file = held[newest][rank] if mine else torch.empty(length, dtype=torch.uint8)
        groups.wait([dist.broadcast(file, source, async_op=True)])
        filling.take(_reading(file))
    filling.finish()
    return newest.step


def _is_complete(generation: Generation, said: Sequence[tuple[int, Lengths]]) -> bool:
    there = {rank for _, known in said for rank in known.get(generation, ())}
    return there == set(range(generation.num_ranks))


def _reading(file: Tensor) -> Read:
    data = memoryview(file.numpy().data)
    return lambda start, num_bytes: bytes(data[start : start + num_bytes])
