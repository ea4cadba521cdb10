"""Restore the newest complete state at the start of every attempt."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from steadfast.checkpoint.durable import Checkpoints, age_s
from steadfast.checkpoint.snapshots import Snapshots
from steadfast.checkpoint.state import HeldState, State, flatten, newest_whole
from steadfast.parallel.dtensor import local
from steadfast.world.control import gather_numbers
from steadfast.world.groups import Groups

_NONE = -1  # sent by a rank that holds no complete state


@dataclass(frozen=True)
class Restored:
    """The state from which an attempt continues."""

    step: int
    source: str  # "rank 2", "snapshot", "checkpoint" or "start"
    age_s: float = 0.0  # of the newest checkpoint, if no worker of the last world knows its age


def restore(
    state: State,
    held: HeldState,
    load_initial: Callable[[], None],
    checkpoints: Checkpoints,
    snapshots: Snapshots,
    extend: Callable[[Collection[str]], None] | None = None,
) -> Restored:
    """Fill every rank with the newest complete state, in place. A collective.

    Args:
        load_initial: completes the initial state with weights from a file; called if there is no other state.
        extend: adds tensors to `state` that only the stored state has, given by the names of the latter's tensors; None
            if there are none.
    """
    restored = _restore(state, held, load_initial, checkpoints, snapshots, extend)
    held.fill(restored.step)
    return restored


def _restore(
    state: State,
    held: HeldState,
    load_initial: Callable[[], None],
    checkpoints: Checkpoints,
    snapshots: Snapshots,
    extend: Callable[[Collection[str]], None] | None,
) -> Restored:
    # Candidates are the states of living workers, snapshots, the newest intact checkpoint, and step 0.
    world = checkpoints.world
    world.progress.enter("restore")
    groups = world.groups
    held_step = _NONE if held.step is None else held.step
    living: list[int] = gather_numbers(held_step, groups.control).tolist()
    newest = newest_whole(living, world.replica_size)
    # A step ends only when all ranks have done it. So a living worker's step is at least as new as any checkpoint, and
    # storage need not be read.
    if newest > 0:
        peers = living[world.part :: world.replica_size]  # the ranks that hold the same part
        if extend is not None and min(living) != newest:
            names = [list(flatten(state))]
            dist.broadcast_object_list(names, src=living.index(newest), group=groups.control)
            extend(names[0])
        if min(peers) != newest:
            _overwrite(state, held, newest, peers.index(newest), groups)
        return Restored(newest, f"rank {living.index(newest)}")
    copied = snapshots.find()
    if copied is not None:
        stored = checkpoints.newest()
        if copied.step >= stored.step:
            held.begin_overwriting()
            if extend is not None:
                extend(snapshots.names(copied))
            snapshots.load(copied, state)
            return Restored(copied.step, "snapshot", stored.age_s)
    found = checkpoints.find()
    if found is None:
        # If no rank can hold the whole state, there is no rank to copy from, so every rank loads its own part.
        if checkpoints.replicated:
            _copy_initial(state, held, load_initial, living, groups)
        else:
            load_initial()
        return Restored(0, "start")
    if extend is not None:
        extend(checkpoints.names(found))
    # Every rank reads its own shards. A replicated state is read by one rank, which broadcasts it.
    if not checkpoints.replicated or world.leader:
        held.begin_overwriting()
        checkpoints.load(found, state)
    if checkpoints.replicated:
        _overwrite(state, held, found.step, 0, groups)
    return Restored(found.step, "checkpoint", age_s(found))


def _copy_initial(
    state: State, held: HeldState, load_initial: Callable[[], None], living: list[int], groups: Groups
) -> None:
    """Fill every rank with the initial state of one rank.

    Args:
        living: the step that each rank holds.
    """
    if 0 not in living:
        # One rank reads the file and broadcasts its content.
        if dist.get_rank() == 0:
            load_initial()
        _overwrite(state, held, 0, 0, groups)
    elif min(living) != 0:
        _overwrite(state, held, 0, living.index(0), groups)


def _overwrite(state: State, held: HeldState, step: int, source: int, groups: Groups) -> None:
    """Broadcast the state of replica `source`.

    If a rank is lost meanwhile, the ranks that held this step before keep it.
    """
    # A rank's state is invalid while the rank receives another state. A rank that already holds this step receives
    # equal bytes and stays valid, unless an abort may leave garbage in place of them.
    if groups.across.group.rank() != source and (held.step != step or groups.communicator.abort_leaves_garbage):
        held.begin_overwriting()
    else:
        held.complete(step)
    broadcast(state, source, groups)


def broadcast(state: State, source: int, groups: Groups) -> None:
    """Broadcast the tensors of replica `source` concurrently."""
    on_host: list[Tensor] = []
    for tensor in flatten(state).values():
        part = local(tensor)
        if groups.reaches(part):
            groups.across.broadcast(part, source)
        elif not part.is_meta:
            on_host.append(part)
    groups.gate()
    # One tensor at a time, because the device may not have room for all.
    for part in on_host:
        staged = part.to(groups.device, copy=True)
        groups.across.broadcast(staged, source)
        groups.gate()
        if groups.across.group.rank() != source:
            part.copy_(staged)
