"""Copies of sharded state in the memory of other nodes: what a lost node took along, another one has."""

# Every so often each rank copies its shards and sends the copy to a rank of another node, while training goes on. So a
# lost node costs the steps since then, not those since the last checkpoint.

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from app.checkpoint.shards import StagingBuffer, load_shards, reader_of, shards_of, shards_to_write
from app.checkpoint.state import State
from app.parallel import Parallel
from app.run import events
from app.storage import Read
from app.units import size
from app.world.control import any_rank
from app.world.groups import Groups
from app.world.runtime import World

_TIME_SHARE = 0.01  # of training, that copies may cost
_MEMORY_SHARE = 0.5  # of what is free, that all workers of a machine may take for them together


class SnapshotId(NamedTuple):
    """Tells which copies belong together. The newest sorts last."""

    step: int
    attempt: int
    num_ranks: int


class _Generation:
    """The memory for one generation of copies, used again and again."""

    def __init__(self) -> None:
        self.id: SnapshotId | None = None  # None while copies are made or received
        self.skip: frozenset[int] = frozenset()
        self.files: dict[int, Tensor] = {}  # by rank: this one's own, and those that it holds for others
        self.own = StagingBuffer()
        self.received = torch.empty(0, dtype=torch.uint8)


class SnapshotStore:
    """The copies that a process holds. They outlive attempts."""

    def __init__(self) -> None:
        # While one generation is being written over, or is lost half-way, the other one is complete.
        self._generations = (_Generation(), _Generation())

    def oldest(self) -> _Generation:
        return min(self._generations, key=lambda each: each.id or (-1, 0, 0))

    def files(self, skip: frozenset[int]) -> dict[tuple[SnapshotId, int], Tensor]:
        """Return the files that are here, by snapshot and rank."""
        files = {}
        for generation in self._generations:
            # Whether a step was finite is not known when it is copied. If it was not, it is left out from then on; and
            # a state is of no use to a world that leaves out other steps than its own did.
            if generation.id is not None and generation.skip == skip:
                for rank, file in generation.files.items():
                    files[generation.id, rank] = file
        return files


class Snapshots:
    """Takes and restores snapshots in one attempt, and is the trigger that says when. To construct is a collective."""

    def __init__(self, world: World, store: SnapshotStore, parallel: Parallel, state: State) -> None:
        self.refused: events.NoSnapshots | None = None  # why no copies are made, if it is for want of memory
        self._world = world
        self._store = store  # the process's own
        self._group: dist.ProcessGroup | None = None  # None where no copies are made
        self._transfer: tuple[dist.Work, _Generation, SnapshotId] | None = None
        self._next_s = -1.0
        self._requested = False
        # Of replicated state every survivor has all. And a single rank has nowhere to copy to.
        if parallel.survivors_hold_all or world.size == 1:
            return
        nodes: list[str] = [""] * world.size
        dist.all_gather_object(nodes, world.node, group=world.groups.control)
        self._backups = torch.tensor([backup_rank(rank, nodes) for rank in range(world.size)])
        # Of each generation a worker holds two files, its own and another's.
        num_bytes = sum(shard.tensor.nbytes for shard in shards_of(state))
        needed_bytes = 4 * num_bytes * nodes.count(world.node)
        free_bytes = psutil.virtual_memory().available
        if any_rank(needed_bytes > _MEMORY_SHARE * free_bytes, world.groups.control):
            needed = f"copies of its shards need {size(needed_bytes)} of a node's memory"
            self.refused = events.NoSnapshots(error=f"{needed}, of which {size(free_bytes)} are free")
            return
        self._group = world.groups.side_group()

    def due(self, step: int) -> bool:
        # How often a copy is worth its time is measured, so only the leader can say.
        return False

    def wanted(self) -> bool:
        self._receive()
        if self._requested or self._transfer is not None or self._group is None or time.monotonic() < self._next_s:
            return False
        self._requested = True
        return True

    def done(self) -> None:
        self._requested = False

    def take(self, step: int, state: State) -> events.Snapshot | None:
        """Copy this rank's shards and send the copy off, unless the last one is still under way. A collective."""
        world = self._world
        world.progress.enter("snapshot")
        began_s = time.monotonic()
        self._receive()
        if any_rank(self._transfer is not None, world.groups.control):
            return None
        generation = self._store.oldest()
        generation.id = None
        generation.skip = world.skip
        generation.own.fill(shards_to_write(state, replicas=world.leader))
        file = generation.own.file()

        lengths = gather_numbers(len(file), world.groups)
        incoming = torch.where(self._backups == world.rank, lengths, 0).tolist()
        outgoing = [0] * world.size
        outgoing[self._backups[world.rank]] = len(file)
        if len(generation.received) < sum(incoming):
            generation.received = torch.empty(sum(incoming), dtype=torch.uint8)
        received = generation.received[: sum(incoming)]
        generation.files = {world.rank: file}
        # One after the other, the file of each rank that has this one as its backup.
        for rank, part in enumerate(received.split(incoming)):
            if len(part):
                generation.files[rank] = part

        work = dist.all_to_all_single(received, file, incoming, outgoing, group=self._group, async_op=True)
        world.groups.under_way.append(work)
        self._transfer = (work, generation, SnapshotId(step, world.attempt, world.size))
        stall_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + stall_s / _TIME_SHARE
        return events.Snapshot(step=step, stall_s=round(stall_s, 4), bytes=len(file))

    def _receive(self) -> None:
        """Take note of a transfer that has ended."""
        if self._transfer is None:
            return
        work, generation, snapshot = self._transfer
        if work.is_completed():
            # Raises if it has failed: then the copy is never taken for complete.
            work.wait()
            self._world.groups.under_way.remove(work)
            generation.id = snapshot
            self._transfer = None

    def restore(self, state: State, committed: int) -> int | None:
        """Fill every rank's shards from the newest snapshot that the living hold all of, and return its step.

        Returns None without such a snapshot, or if a rank knows a newer checkpoint to be `committed`.
        """
        files = self._store.files(self._world.skip)
        lengths = {key: len(file) for key, file in files.items()}
        answers: list[tuple[int, dict[tuple[SnapshotId, int], int]]] = [(0, {})] * self._world.size
        dist.all_gather_object(answers, (committed, lengths), group=self._world.groups.control)

        newest_committed = 0
        sources: dict[SnapshotId, dict[int, tuple[int, int]]] = {}  # by rank of the lost world: who has its file
        for holder, (its_committed, its_lengths) in enumerate(answers):
            newest_committed = max(newest_committed, its_committed)
            for (snapshot, rank), length in its_lengths.items():
                sources.setdefault(snapshot, {}).setdefault(rank, (holder, length))
        complete = [snapshot for snapshot, ranks in sources.items() if len(ranks) == snapshot.num_ranks]
        newest = max(complete, default=None)
        if newest is None or newest.step < newest_committed:
            return None

        def received() -> Iterator[Read]:
            # One file after the other, so that a process needs room for one only.
            for rank, (holder, length) in sorted(sources[newest].items()):
                mine = holder == self._world.rank
                file = files[newest, rank] if mine else torch.empty(length, dtype=torch.uint8)
                self._world.groups.wait([dist.broadcast(file, holder, async_op=True)])
                yield reader_of(file)

        load_shards(received(), shards_of(state))
        return newest.step


def backup_rank(rank: int, nodes: Sequence[str]) -> int:
    """Return the rank that holds the copy of `rank`: one on the next other node, or the next one if there is none."""
    for ahead in range(1, len(nodes)):
        other = nodes[(rank + ahead) % len(nodes)]
        if other != nodes[rank]:
            # Ranks of a node sit side by side, and the first one of the next must not hold the copies of all of them.
            place = nodes[:rank].count(nodes[rank])
            holders = [each for each, node in enumerate(nodes) if node == other]
            return holders[place % len(holders)]
    return (rank + 1) % len(nodes)


def gather_numbers(number: int, groups: Groups) -> Tensor:
    """Return the number that each rank gives. A collective."""
    numbers = torch.empty(dist.get_world_size(), 1, dtype=torch.int64)
    dist.all_gather(list(numbers), torch.tensor([number]), group=groups.control)
    return numbers.squeeze(1)
