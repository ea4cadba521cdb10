"""The one way back: at the start of every attempt, for whatever reason the last one ended."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from app.checkpoint.durable import CheckpointStore
from app.checkpoint.state import Tensors, flatten

NO_STATE = -1


@dataclass(frozen=True)
class Restored:
    step: int
    source: str  # "rank 2", "checkpoint", "start"


def restore(
    state: dict[str, Tensors], held: int, store: CheckpointStore, group: dist.ProcessGroup, replicated: bool
) -> Restored:
    """Makes every rank hold the newest complete state, in place. A collective.

    Candidates are the living workers' own states, the newest whole checkpoint, and step 0. The highest step wins; a
    tie goes to the cheapest, which is the one that need not be read.

    Args:
        held: the step whose state this worker holds complete, or NO_STATE.
        group: a gloo group of the world.
        replicated: one worker's state is all of the state; otherwise the dead took their shards with them.
    """
    world_size = dist.get_world_size(group)
    steps = [torch.empty(2, dtype=torch.int64) for _ in range(world_size)]
    stored = store.newest() if dist.get_rank(group) == 0 else 0  # one rank looks: a commit may land meanwhile
    mine = torch.tensor([held if replicated else NO_STATE, stored])
    dist.all_gather(steps, mine, group=group)
    living = [int(each[0]) for each in steps]
    newest, stored = max(living), int(steps[0][1])
    if newest >= stored and newest != NO_STATE:
        source = living.index(newest)
        if min(living) != newest:
            broadcast(state, source)
        return Restored(newest, f"rank {source}")
    if stored:
        store.load(stored, state)
        return Restored(stored, "checkpoint")
    return Restored(0, "start")


def broadcast(state: dict[str, Tensors], source: int) -> None:
    """Overwrites every rank's tensors with those of `source`, all of them under way at once."""
    works = [dist.broadcast(tensor, source, async_op=True) for tensor in flatten(state).values()]
    for work in works:
        work.wait()
