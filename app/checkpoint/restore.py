"""The one way back: at the start of every attempt, for whatever reason the last one ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from app.checkpoint.durable import CheckpointStore
from app.checkpoint.state import Tensors, flatten
from app.groups import Groups

NO_STATE = -1


class Holder(Protocol):
    """held: the step whose state it holds complete, 0 for the initial one, or NO_STATE."""

    held: int


@dataclass(frozen=True)
class Restored:
    step: int
    source: str  # "rank 2", "checkpoint", "start"


def restore(
    state: dict[str, Tensors], holder: Holder, store: CheckpointStore, groups: Groups, replicated: bool
) -> Restored:
    """Makes every rank hold the newest complete state, in place. A collective.

    Candidates are the living workers' own states, the newest whole checkpoint, and step 0. The highest step wins; a
    tie goes to the cheapest, which is the one that need not be read. Only a state that is being overwritten is nobody's
    until that has ended: whoever is lost on the way, the others keep what they had. The same over the same does no
    harm, except that an aborted NCCL may leave anything.

    Args:
        replicated: one worker's state is all of the state; otherwise the dead took their shards with them.
    """
    world_size = dist.get_world_size()
    steps = [torch.empty(2, dtype=torch.int64) for _ in range(world_size)]
    stored = store.newest() if dist.get_rank() == 0 else 0  # one rank looks: a commit may land meanwhile
    mine = torch.tensor([holder.held if replicated else NO_STATE, stored])
    dist.all_gather(steps, mine, group=groups.control)
    living = [int(each[0]) for each in steps]
    newest, stored = max(living), int(steps[0][1])
    if newest >= stored:
        source = living.index(newest)
        if min(living) != newest:
            overwritten = dist.get_rank() != source and (holder.held != newest or _is_on_device(state))
            holder.held = NO_STATE if overwritten else newest
            broadcast(state, source, groups)
        restored = Restored(newest, f"rank {source}" if newest else "start")
    elif stored:
        holder.held = NO_STATE
        store.load(stored, state)
        restored = Restored(stored, "checkpoint")
    else:
        restored = Restored(0, "start")
    holder.held = restored.step
    return restored


def _is_on_device(state: dict[str, Tensors]) -> bool:
    return any(tensor.is_cuda for tensor in flatten(state).values())


def broadcast(state: dict[str, Tensors], source: int, groups: Groups) -> None:
    """Overwrites every rank's tensors with those of `source`, all of them under way at once."""
    groups.wait([dist.broadcast(tensor, source, async_op=True) for tensor in flatten(state).values()])
