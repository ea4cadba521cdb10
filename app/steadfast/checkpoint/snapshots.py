"""Copies of the newest state in each node's memory, outside of workers.

A copy is cheap, so one is made every few seconds: the loss of all workers of a node costs the steps since the last copy
instead of those since the last checkpoint. Each node has a copy of replicated state. Of sharded state each rank copies
its own shards and sends the copy to another node too, which replaces a lost node's copy. If several replicas hold the
same parts of a model, the first replica makes the copies, more often if `checkpoint.lose_at_most` needs it.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from steadfast.checkpoint.catalog import skipped_up_to
from steadfast.checkpoint.memory_server import free_bytes
from steadfast.checkpoint.node_memory import Buffer, Files, Label, NodeMemory, SnapshotId
from steadfast.checkpoint.promise import Promise
from steadfast.checkpoint.shards import (
    FileLayout,
    Request,
    Shard,
    header_of,
    load_shards,
    names_in,
    optional_for,
    reader_of,
    requests_for,
    shards_of,
    shards_to_write,
    total_bytes,
)
from steadfast.checkpoint.state import HeldShards, State
from steadfast.config import Every
from steadfast.parallel import Parallel
from steadfast.run.events import Notice, Snapshot
from steadfast.storage import Read
from steadfast.units import size
from steadfast.world.control import any_rank, gather_numbers, gather_objects
from steadfast.world.runtime import Outcome, World

_TIME_SHARE = 0.01  # of training time, for copies
_GENERATIONS = 2  # copies kept: the newest complete one, and the one in progress
_MEMORY_SHARE = 0.5  # of the free memory, for the copies of all workers of a machine

_Key = tuple[SnapshotId, int]  # a rank's file of a snapshot


class AtRisk(NamedTuple):
    """Finished steps that would be repeated after each kind of loss."""

    worker: int
    workers_of_node: int  # all workers of a node, whose machine survives
    workers: int  # all workers, whose machines survive
    node: int
    everything: int  # except storage

    @classmethod
    def of(
        cls, step: int, newest: int, committed: int, replica_size: int, ranks_by_node: Collection[Sequence[int]]
    ) -> Self:
        """Return the steps at risk after `step`.

        Args:
            newest: step of the newest state in node memory.
            committed: step of the newest checkpoint.
            replica_size: number of neighbouring ranks that hold different parts of the state.
            ranks_by_node: the ranks on each node.
        """
        in_memory = step - newest
        risk = cls(in_memory, in_memory, in_memory, step - committed, step - committed)
        num_nodes, num_ranks = len(ranks_by_node), sum(map(len, ranks_by_node))
        # Each copy is on two nodes, or on every node, so one node does not take all of them along.
        if num_nodes > 1:
            risk = risk._replace(node=in_memory)
        # Another replica holds each part that one replica loses.
        if num_ranks > replica_size:
            risk = risk._replace(worker=0)
        num_replicas = num_ranks // replica_size
        if all(_copies_of_a_part(ranks, replica_size) < num_replicas for ranks in ranks_by_node):
            risk = risk._replace(workers_of_node=0, node=0)
        return risk


def _copies_of_a_part(ranks: Sequence[int], replica_size: int) -> int:
    """Return how many replicas have the same part of the state on these ranks, for the part with the most.

    The parts are those of the model and optimizer in use. Copies in node memory do not count.
    """
    return max(Counter(rank % replica_size for rank in ranks).values())


class _Place(NamedTuple):
    """A rank's node and memory, as sent to all ranks."""

    node: str
    lasting: bool  # the copies outlive the process
    file_bytes: int
    free_bytes: int
    held_bytes: int  # used by former copies on the node


@dataclass(frozen=True)
class Found:
    """A complete snapshot, and the rank that provides each of its files."""

    id: SnapshotId
    sources: dict[int, tuple[int, int]]  # rank of the former world -> (rank that has the file now, length)
    everywhere: bool  # every rank can read all files itself

    @property
    def step(self) -> int:
        return self.id.step


@dataclass
class _Copy:
    """One rank's part of a snapshot in progress."""

    snapshot: SnapshotId
    own: Buffer | None = None  # None if another rank makes the same copy
    own_files: Files = ()
    received: Buffer | None = None
    received_files: Files = ()
    work: dist.Work | None = None  # the transfer to another node, until it is complete


class Snapshots:
    """Takes and restores snapshots in one attempt, and is their trigger.

    The constructor is a collective.

    Args:
        bound: largest age of the newest copy of a sharded state.
        data: fingerprint of the dataset and of frozen parameters. Copies of another model or other data are ignored,
            because code may have changed since a command was killed.
    """

    def __init__(
        self, world: World, memory: NodeMemory | None, parallel: Parallel, state: State, bound: Every, data: str = ""
    ) -> None:
        self.refused: Notice | None = None  # why no copies are made, if memory is insufficient
        self.damaged: dict[int, str] = {}  # step -> why `find` has rejected its snapshot
        self._world = world
        self._memory = memory  # belongs to the process; None if copies are not wanted
        self._replicated = parallel.survivors_hold_all
        self._origin = ""
        self._on = False
        self._writes = False
        self._takes_part = False  # in the collectives of a copy
        self._group: dist.ProcessGroup | None = None  # None if nothing is sent to other nodes
        self._copy: _Copy | None = None  # in progress
        self._made: SnapshotId | None = None  # of which this rank's part is complete
        self._lost = False  # this rank's part of the current copy cannot be kept
        self._whole: SnapshotId | None = None  # the newest that is complete on all ranks
        self._next_s = -1.0
        self._reserving: threading.Thread | None = None  # makes room for the first copies
        self._requested = False
        self.num_nodes = 1
        self.nodes: dict[str, tuple[int, ...]] = {}  # node -> its ranks; empty if copies are not wanted
        if memory is not None:
            self._origin = origin_of(data, state)
            self._begin(memory, state)
        self.promise = None if self._replicated else Promise(bound, self._trained_s, self._on)

    def _trained_s(self) -> float:
        spent_s = self._world.progress.spent_s
        return time.monotonic() - spent_s("validation") - spent_s("checkpoint") - spent_s("compile")

    def _begin(self, memory: NodeMemory, state: State) -> None:
        memory.give_back()  # buffers of a copy that the end of the last attempt has interrupted
        world = self._world
        num_bytes = self._layout(state).num_bytes
        mine = _Place(world.node, memory.lasting, num_bytes, free_bytes(), memory.held_bytes())
        places: list[_Place] = gather_objects(mine, world.groups.control)
        nodes = [place.node for place in places]
        for rank, node in enumerate(nodes):
            self.nodes[node] = (*self.nodes.get(node, ()), rank)
        self.num_nodes = len(self.nodes)
        lasting = all(place.lasting for place in places)
        # A copy in a process's own memory is lost with the process, so another process must get it, even on this node.
        sends = not self._replicated and world.size > 1 and (self.num_nodes > 1 or not lasting)
        if not sends and not lasting:
            return
        writers = list(range(world.replica_size))
        if self._replicated:
            # All ranks of a node hold the same state, so one of them makes the node's copy.
            writers = [ranks[0] for ranks in self.nodes.values()]
        backups: list[int] = []
        if sends:
            backups = backup_ranks(nodes)
        self.refused = _refusal(places, writers, backups)
        self._on = self.refused is None
        self._writes = self._on and world.rank in writers
        self._takes_part = self._writes or (self._on and not self._replicated)
        if self._on and sends:
            # The transfer has a group of its own, because it continues while training uses the other groups.
            self._backups = torch.tensor(backups)
            self._group = world.groups.side_group()
        if self._writes:
            num_buffers = _GENERATIONS
            if memory.held_bytes():
                num_buffers = 1  # a former world has left a copy, which is the other generation
            self._reserving = memory.reserve(num_bytes, num_buffers)

    def due(self, step: int) -> bool:
        # Any other interval depends on measured time, so only the leader requests a copy.
        return self._on and self.promise is not None and self.promise.due(step)

    def wanted(self) -> bool:
        self._receive()
        urgent = self._on and self.promise is not None and self.promise.is_urgent()
        # A copy waits for memory that is still being reserved.
        early = time.monotonic() < self._next_s or (self._reserving is not None and self._reserving.is_alive())
        if self._requested or self._copy is not None or not self._on or (early and not urgent):
            return False
        self._requested = True
        return True

    def done(self) -> None:
        self._requested = False

    def take(self, step: int, state: State) -> Snapshot | Notice | None:
        """Copy this rank's part of the state, to another node if needed.

        Nothing happens while the last copy is in progress. A collective if the state is sharded.
        """
        if self._memory is None or not self._takes_part:
            return None
        self._world.progress.enter("snapshot")
        began_s = time.monotonic()
        self._receive()
        if not self._may_begin(step):
            return None
        snapshot = SnapshotId(step, self._world.attempt, self._world.replica_size)
        self._lost = False
        told: Snapshot | Notice | None = None
        # The last whole copy stays until this one is whole on all ranks: a world that ends meanwhile needs it.
        kept = [snapshot]
        if self._whole is not None:
            kept.append(self._whole)
        try:
            self._memory.keep(kept)
        except OSError as error:
            # The other ranks wait for this rank in the transfer, so it goes on without keeping its part.
            self._lost = True
            told = _no_snapshots(str(error))
        self._copy = copy = _Copy(snapshot)
        num_bytes = 0
        once_s = 0.0  # what later copies do not cost: memory that is new has to be mapped and pinned
        if self._writes:
            layout = self._layout(state)
            num_bytes = layout.num_bytes
            taking_s = time.monotonic()
            try:
                copy.own = self._memory.take(num_bytes)
            except OSError as error:
                copy.own = self._unkept(num_bytes)
                told = _no_snapshots(str(error))
            once_s = time.monotonic() - taking_s
            layout.fill(copy.own.bytes)
            copy.own_files = ((self._world.part, 0, num_bytes),)
        if self._group is not None:
            self._send(copy, num_bytes, self._group)
        self._receive()
        if self.promise is not None and self.promise.in_steps:
            self._finish()  # the transfer may take longer than the steps of the bound
        # The interval follows from the measured stall, so that copies take the same share of the time for any model.
        stall_s = time.monotonic() - began_s
        self._next_s = time.monotonic() + (stall_s - once_s) / _TIME_SHARE
        return told or Snapshot(step=step, stall_s=round(stall_s, 4), bytes=num_bytes)

    def hand_over(self, outcome: Outcome, state: State) -> Snapshot | Notice | None:
        """Copy a sharded state for a following world, and wait. A collective."""
        # The next world then need not read storage. Under DDP it finds the state in the survivors.
        if self._replicated or outcome.kind != "resized":
            return None
        self._finish()
        told = self.take(outcome.step, state)
        self._finish()
        return told

    def _finish(self) -> None:
        """Wait for the copy in progress."""
        if self._copy is not None and self._copy.work is not None:
            self._world.groups.wait([self._copy.work])
        self._receive()

    def _layout(self, state: State) -> FileLayout:
        return FileLayout.of(shards_to_write(state, self._world))

    def _may_begin(self, step: int) -> bool:
        """Return whether no copy is in progress, after recording completed ones."""
        if self.promise is None:
            # A copy of a former world counts, so that `keep` does not release it before there is a newer one.
            if self._whole is None:
                self._whole = max((label.snapshot for label in self._stored().values()), default=None)
            return True
        # The ranks answer together, because a rank that began alone would wait in the transfer for ever. Once no copy
        # is in progress, the last one is whole if every rank has kept its part.
        control = self._world.groups.control
        if any_rank(self._copy is not None, control):
            return False
        if is_whole := not any_rank(self._made is None, control):
            self._whole = self._made
        self.promise.begin_copy(step, is_whole)
        self._made = None
        return True

    def _unkept(self, num_bytes: int) -> Buffer:
        """Return temporary memory, for this rank to join the transfer."""
        self._lost = True
        return Buffer(None, torch.empty(num_bytes, dtype=torch.uint8))

    def _send(self, copy: _Copy, num_bytes: int, group: dist.ProcessGroup) -> None:
        world = self._world
        assert self._memory is not None
        # Parts of a sharded state differ in size, so each rank asks for the lengths of all.
        lengths = gather_numbers(num_bytes, world.groups.control)
        incoming = torch.where(self._backups == world.rank, lengths, 0).tolist()
        outgoing = [0] * world.size
        outgoing[self._backups[world.rank]] = num_bytes
        # The files of all ranks that have this one as their backup, one after the other.
        start = 0
        for rank, length in enumerate(incoming):
            if length:
                copy.received_files += ((rank, start, length),)
            start += length
        sent = received = torch.empty(0, dtype=torch.uint8)
        if start:
            try:
                copy.received = self._memory.take(start)
            except OSError:
                copy.received = self._unkept(start)
            received = copy.received.bytes[:start]
        if copy.own is not None:
            sent = copy.own.bytes[:num_bytes]
        copy.work = dist.all_to_all_single(received, sent, incoming, outgoing, group=group, async_op=True)
        world.groups.under_way.append(copy.work)

    def _receive(self) -> None:
        """Record a completed copy, if any."""
        copy = self._copy
        if copy is None or self._memory is None or (copy.work is not None and not copy.work.is_completed()):
            return
        self._copy = None
        if copy.work is not None:
            # Raises if the transfer has failed: then the copy is never taken for complete.
            copy.work.wait()
            self._world.groups.under_way.remove(copy.work)
        try:
            if copy.own is not None:
                self._memory.commit(copy.own, self._label(copy.snapshot, copy.own_files))
            if copy.received is not None:
                self._memory.commit(copy.received, self._label(copy.snapshot, copy.received_files))
        except OSError:
            self._lost = True
        if not self._lost:
            self._made = copy.snapshot
            if self.promise is None:
                self._whole = copy.snapshot
            else:
                self.promise.complete_copy()

    def at_risk(self, step: int, committed: int) -> AtRisk:
        """Return the steps at risk, with a checkpoint of step `committed`."""
        newest = committed
        made = self._made or self._whole
        if made is not None:
            newest = max(committed, made.step)
        ranks = list(self.nodes.values()) or [tuple(range(self._world.size))]
        return AtRisk.of(step, newest, committed, self._world.replica_size, ranks)

    def _label(self, snapshot: SnapshotId, files: Files) -> Label:
        return _label(snapshot, files, self._origin, self._world.amendments.skip)

    def _stored(self) -> dict[int, Label]:
        if self._memory is None:
            return {}
        return stored_copies(self._memory, self._origin, self._world.amendments.skip)

    def find(self) -> Found | None:
        """Return the newest snapshot that the living ranks hold completely. A collective."""
        if self._memory is None:
            return None
        mine: dict[_Key, int] = {}
        for label in self._stored().values():
            for rank, _, num_bytes in label.files:
                mine[label.snapshot, rank] = num_bytes
        answers = gather_objects(mine, self._world.groups.control)

        # Every rank has the same answers and removes the same files, so all ranks choose the same snapshot.
        while (newest := self._newest(answers)) is not None:
            if not self._drop_damaged(newest, answers):
                return self._found(newest, answers)
        return None

    def _newest(self, answers: Sequence[dict[_Key, int]]) -> SnapshotId | None:
        """Return the newest snapshot of which the ranks together hold all files."""
        held: dict[SnapshotId, set[int]] = {}
        for snapshot, rank in itertools.chain(*answers):
            held.setdefault(snapshot, set()).add(rank)
        whole = [snapshot for snapshot, ranks in held.items() if len(ranks) == snapshot.num_ranks]
        return max(whole, default=None)

    def _drop_damaged(self, snapshot: SnapshotId, answers: Sequence[dict[_Key, int]]) -> bool:
        """Remove damaged files from the answers; return whether there were any.

        A collective.
        """
        world = self._world
        assert self._memory is not None
        # The ranks of a node have the same files in its memory, and share the reading.
        peers = self.nodes[world.node] if self._memory.lasting else (world.rank,)
        keys: set[_Key] = set()
        for rank in peers:
            for key in answers[rank]:
                if key[0] == snapshot:
                    keys.add(key)
        damaged: dict[_Key, str] = {}
        for key in sorted(keys)[peers.index(world.rank) :: len(peers)]:
            try:
                self._verify(*key)
            except OSError as error:
                damaged[key] = str(error)
        found = gather_objects(damaged, self._world.groups.control)
        for node, ranks in self.nodes.items():
            for finder in ranks:
                for key, why in found[finder].items():
                    self.damaged[snapshot.step] = f"on {node}: {why}"
                    for rank in ranks:
                        answers[rank].pop(key, None)
        return any(found)

    def _found(self, newest: SnapshotId, answers: Sequence[dict[_Key, int]]) -> Found:
        sources: dict[int, tuple[int, int]] = {}  # by rank of the lost world
        for holder, answer in enumerate(answers):
            for (snapshot, rank), num_bytes in answer.items():
                if snapshot == newest:
                    sources.setdefault(rank, (holder, num_bytes))
        self._whole = newest
        needed = {(newest, rank) for rank in sources}
        everywhere = all(map(needed.issubset, answers))
        return Found(newest, sources, everywhere)

    def names(self, found: Found) -> set[str]:
        """Return the names of all tensors in a snapshot. A collective."""
        own = [rank for rank, (holder, _) in found.sources.items() if holder == self._world.rank]
        headers = gather_objects([header_of(self._open(found.id, rank)) for rank in own], self._world.groups.control)
        return names_in(itertools.chain(*headers))

    def load(self, found: Found, state: State) -> None:
        """Fill every rank's shards from a snapshot. A collective."""
        shards = shards_of(state)
        load_shards(self._files(found, shards), shards, optional=optional_for(shards))

    def _files(self, found: Found, shards: list[Shard]) -> Iterator[Read]:
        if found.everywhere:
            for rank in sorted(found.sources):
                yield reader_of(self._open(found.id, rank))
            return
        own = [rank for rank, (holder, _) in sorted(found.sources.items()) if holder == self._world.rank]
        files = {rank: self._open(found.id, rank) for rank in own}
        if not self._replicated:
            yield from self._parts(files, found, shards)
            return
        for rank, (holder, num_bytes) in sorted(found.sources.items()):
            yield self._whole_from(files.get(rank), holder, num_bytes)

    def _whole_from(self, file: Tensor | None, holder: int, num_bytes: int) -> Read:
        """Broadcast a whole file from rank `holder` to all ranks. A collective."""
        if file is None:
            file = torch.empty(num_bytes, dtype=torch.uint8)
        self._world.groups.wait([dist.broadcast(file, holder, async_op=True)])
        return reader_of(file)

    def _parts(self, files: dict[int, Tensor], found: Found, shards: list[Shard]) -> Iterator[Read]:
        """Yield a reader of this rank's parts of each file. A collective.

        The number of collectives does not depend on the number of files.

        Args:
            files: those that this rank sends, by rank of the lost world.
        """
        groups = self._world.groups
        # A holder does not know the shards of the other ranks, so each rank finds its byte ranges in the headers.
        headers: dict[int, bytes] = {}
        for each in gather_objects({rank: header_of(file) for rank, file in files.items()}, self._world.groups.control):
            headers |= each
        mine = {rank: requests_for(shards, headers[rank]) for rank in sorted(headers)}
        incoming, outgoing = [0] * self._world.size, [0] * self._world.size
        parts = [torch.empty(0, dtype=torch.uint8)]  # not empty, because `cat` refuses an empty list
        for receiver, wanted in enumerate(gather_objects(mine, self._world.groups.control)):
            for rank, file in files.items():
                parts += [file[start : start + num_bytes] for start, num_bytes in wanted[rank]]
                outgoing[receiver] += total_bytes(wanted[rank])
        for rank, requests in mine.items():
            incoming[found.sources[rank][0]] += total_bytes(requests)
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        exchange = dist.all_to_all_single(received, torch.cat(parts), incoming, outgoing, async_op=True)
        groups.wait([exchange])

        # The bytes come in the order of holders, and those of one holder in the order of its files.
        order = sorted(mine, key=lambda rank: (found.sources[rank][0], rank))
        ranges = [(rank, request) for rank in order for request in mine[rank]]
        cut = torch.split(received, [request.num_bytes for _, request in ranges])
        bytes_of = dict(zip(ranges, cut, strict=True))

        def read(rank: int, start: int, num_bytes: int) -> bytes:
            if start == 0:  # only the header begins there, no data
                return headers[rank][:num_bytes]
            return bytes(bytes_of[rank, Request(start, num_bytes)].numpy().data)

        for rank in mine:
            yield partial(read, rank)

    def _open(self, snapshot: SnapshotId, of_rank: int) -> Tensor:
        assert self._memory is not None
        number, start, num_bytes = self._place_of(snapshot, of_rank)
        return self._memory.open(number)[start : start + num_bytes]

    def _verify(self, snapshot: SnapshotId, of_rank: int) -> None:
        assert self._memory is not None
        number, _, _ = self._place_of(snapshot, of_rank)
        self._memory.verify(number)

    def _place_of(self, snapshot: SnapshotId, of_rank: int) -> tuple[int, int, int]:
        """Return buffer, first byte and length of a file, or raise OSError."""
        for number, label in self._stored().items():
            for rank, start, num_bytes in label.files:
                if (label.snapshot, rank) == (snapshot, of_rank):
                    return number, start, num_bytes
        raise OSError(f"the snapshot of step {snapshot.step} is gone")


def origin_of(data: str, state: State) -> str:
    """Return an identifier of model shapes and data, to recognize copies.

    Args:
        data: fingerprint of the dataset, and of parameters that the state leaves out.
    """
    shapes = [(shard.name, shard.shape) for shard in shards_of({"model": state["model"]})]
    return str((data, sorted(shapes)))


def copy_shards(held: HeldShards, step: int, memory: NodeMemory, data: str, skip: frozenset[int]) -> None:
    """Copy a rank's shards of a former world to memory, as its part of a snapshot.

    Nothing is copied if the former world has made that snapshot.

    Args:
        step: step whose state the shards are.
        data: as in `origin_of`.
        skip: steps that were skipped.

    Raises:
        OSError: there is not enough memory.
    """
    layout = FileLayout.of(shards_to_write(held.state, held.world))
    snapshot = SnapshotId(step, held.world.attempt, held.world.replica_size)
    files = ((held.world.part, 0, layout.num_bytes),)
    label = _label(snapshot, files, origin_of(data, held.state), skip)
    if label in memory.stored().values():
        return
    memory.give_back()  # buffers of a copy that the end of the former world has interrupted
    buffer = memory.take(layout.num_bytes)
    layout.fill(buffer.bytes)
    memory.commit(buffer, label)


def _label(snapshot: SnapshotId, files: Files, origin: str, skip: frozenset[int]) -> Label:
    skipped = skipped_up_to(snapshot.step, skip)
    return Label(snapshot, hashlib.sha256(f"{origin} {skipped}".encode()).hexdigest()[:16], files)


def stored_copies(memory: NodeMemory, origin: str, skip: frozenset[int]) -> dict[int, Label]:
    """Return the copies of a run with these skipped steps, by number.

    See `origin_of`.
    """
    # A step may prove to be not finite after it was copied, and is then skipped. A state that was made with other
    # skipped steps is useless for a world.
    found = {}
    for number, label in memory.stored().items():
        if label == _label(label.snapshot, label.files, origin, skip):
            found[number] = label
    return found


def _refusal(places: Sequence[_Place], writers: Sequence[int], backups: Sequence[int]) -> Notice | None:
    """Return which node lacks memory for its copies, None if none.

    Copies from other nodes count too.

    Args:
        places: of all ranks.
        writers: the ranks that make files.
        backups: rank to which each rank sends its file; [] if none is sent.
    """
    needed: dict[str, int] = {}
    for rank in writers:
        for holder in [rank, *backups[rank : rank + 1]]:
            node = places[holder].node
            needed[node] = needed.get(node, 0) + _GENERATIONS * places[rank].file_bytes
    places_by_node: dict[str, list[_Place]] = {}
    for place in places:
        places_by_node.setdefault(place.node, []).append(place)
    for node, needed_bytes in needed.items():
        # The ranks of a node measure at different moments, so their numbers differ. Memory of former copies is used
        # again.
        there_bytes = min(place.free_bytes for place in places_by_node[node])
        there_bytes += max(place.held_bytes for place in places_by_node[node])
        if needed_bytes > _MEMORY_SHARE * there_bytes:
            error = f"copies of the state need {size(needed_bytes)} of a node's memory"
            return _no_snapshots(f"{error}, of which {size(there_bytes)} are free")
    return None


def _no_snapshots(error: str) -> Notice:
    cost = "the death of all workers costs the steps since the last checkpoint"
    return Notice(event="no_snapshots", text=f"no snapshots in node memory: {error}; {cost}", error=error)


def backup_ranks(nodes: Sequence[str]) -> list[int]:
    """Return for each rank the rank that holds its copy.

    The holder is on the next other node, or else the next rank.

    Args:
        nodes: node of each rank.
    """
    ranks_by_node: dict[str, list[int]] = {}
    places: list[int] = []  # of each rank among the ranks of its node
    for rank, node in enumerate(nodes):
        ranks = ranks_by_node.setdefault(node, [])
        places.append(len(ranks))
        ranks.append(rank)
    backups = [(rank + 1) % len(nodes) for rank in range(len(nodes))]
    if len(ranks_by_node) == 1:
        return backups
    other = nodes[0]
    # Twice around, because the last ranks learn the node after theirs from the first ranks.
    for rank in 2 * tuple(reversed(range(len(nodes)))):
        following = nodes[(rank + 1) % len(nodes)]
        if following != nodes[rank]:
            other = following
        # Ranks of a node are neighbours, so their copies are spread over all ranks of the next node.
        holders = ranks_by_node[other]
        backups[rank] = holders[places[rank] % len(holders)]
    return backups
