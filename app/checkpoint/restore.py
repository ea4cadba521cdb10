"""The one way back: at the start of every attempt, for whatever reason the last one ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from app.checkpoint.durable import Checkpoints
from app.checkpoint.snapshots import Shelf, restore_snapshot
from app.checkpoint.state import Tensors, flatten
from app.checkpoint.writer import Writer
from app.groups import Groups

NO_STATE = -1


class Holder(Protocol):
    """held: the step whose state it holds complete, 0 for the initial one, or NO_STATE."""

    held: int
    skip: frozenset[int]
    shelf: Shelf
    writer: Writer


@dataclass(frozen=True)
class Restored:
    """damaged: the checkpoints, by step, that could not be used, and why. age_s: of the checkpoint."""

    step: int
    source: str  # "rank 2", "snapshot", "checkpoint", "start"
    damaged: dict[int, str] = field(default_factory=dict)
    age_s: float = 0.0


def restore(
    state: dict[str, Tensors], holder: Holder, checkpoints: Checkpoints, groups: Groups, replicated: bool
) -> Restored:
    """Makes every rank hold the newest complete state, in place. A collective.

    Candidates are the living workers' own states, snapshots, the newest whole checkpoint, and step 0. A living worker
    that has done any step has done all that were ever committed, because no step ends without all: so storage is not
    asked where there is one. Only a state that is being overwritten is nobody's until that has ended: whoever is lost
    on the way, the others keep what they had. The same over the same does no harm, except that an aborted NCCL may
    leave anything.

    Args:
        replicated: one worker's state is all of the state; otherwise the dead took their shards with them.
    """
    living = _held_by_all(holder.held if replicated else NO_STATE, groups)
    if (newest := max(living)) > 0:
        source = living.index(newest)
        if min(living) != newest:
            _overwrite(state, holder, newest, source, groups)
        holder.held = newest
        return Restored(newest, f"rank {source}")
    if not replicated:
        copied = restore_snapshot(state, holder.shelf, holder.skip, holder.writer.committed, groups)
        if copied is not None:
            holder.held = copied
            return Restored(copied, "snapshot")
    found, damaged = checkpoints.find()
    if found is None:
        if replicated and min(living) != 0:
            _overwrite(state, holder, 0, living.index(0), groups)
        holder.held = 0
        return Restored(0, "start", damaged)
    if not replicated or dist.get_rank() == 0:
        holder.held = NO_STATE
        checkpoints.load(found, state)
    if replicated:
        _overwrite(state, holder, found.step, 0, groups)
    holder.held = found.step
    return Restored(found.step, "checkpoint", damaged, max(0.0, time.time() - found.time_s))


def _held_by_all(mine: int, groups: Groups) -> list[int]:
    steps = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([mine]), group=groups.control)
    return [int(each) for each in steps]


def _overwrite(state: dict[str, Tensors], holder: Holder, step: int, source: int, groups: Groups) -> None:
    on_device = any(tensor.is_cuda for tensor in flatten(state).values())
    overwritten = dist.get_rank() != source and (holder.held != step or on_device)
    holder.held = NO_STATE if overwritten else step
    broadcast(state, source, groups)


def broadcast(state: dict[str, Tensors], source: int, groups: Groups) -> None:
    """Overwrites every rank's tensors with those of `source`, all of them under way at once."""
    groups.wait([dist.broadcast(tensor, source, async_op=True) for tensor in flatten(state).values()])
