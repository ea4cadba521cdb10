"""`batch.microbatch_size: auto`: measure what samples take, and choose a size once for the whole run.

The size is part of what the result follows from. So it is on storage before the first step, and whoever trains later,
in another world or on another GPU, takes it from there; what does not fit then is run in parts (app/data/parts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from app.checkpoint.memory_server import free_bytes
from app.components.buffers import Buffers
from app.components.worker_state import WorkerState
from app.config import Config
from app.data.randomness import own_randomness
from app.faults.out_of_memory import smaller
from app.parallel import Parallel
from app.plan import largest_microbatch
from app.run import events
from app.run.directory import RunDirectory
from app.world.allocations import Allocations
from app.world.control import gather_numbers
from app.world.runtime import Runtime, World, publish_once

# Of what is free. The rest is for samples that are longer than the first two, and for what lies between the allocator's
# blocks; to run out costs an attempt, and from then on two forwards for one.
_USED_SHARE = 0.8
_NOT_CHOSEN = 0  # on the wire


class Room(NamedTuple):
    """What a rank has measured, in bytes beyond what it holds between two steps."""

    one: int  # the most that a forward and backward of one sample takes
    two: int  # of two samples
    free: int

    @property
    def sample(self) -> int:
        """Return what one more sample takes."""
        return self.two - self.one

    @property
    def num_fitting(self) -> float:
        """Return how many samples fit, at least the one that has been tried."""
        if self.sample <= 0:
            return math.inf
        fixed = max(0, self.one - self.sample)
        return max(1, (_USED_SHARE * self.free - fixed) // self.sample)


def fix_microbatch_size(
    config: Config,
    runtime: Runtime,
    world: World,
    worker: WorkerState,
    directory: RunDirectory,
    parallel: Parallel,
    model: nn.Module,
) -> None:
    """Have all ranks know the size of a microbatch: the given one, else the run's, else one that is chosen now.

    A collective where it is auto. The state is restored by now, and is the same afterwards.

    Raises:
        OutOfMemory: two samples do not fit; the next attempt knows.
        TrainingError: one sample does not fit.
        StorageError: what was chosen cannot be known, or not be remembered.
    """
    if config.batch.microbatch_size != "auto":
        return
    known = worker.batch.microbatch_size
    size = _largest(_NOT_CHOSEN if known == "auto" else known, world)
    if size == _NOT_CHOSEN:  # to anybody who lives
        size = _largest((directory.microbatch_size() or _NOT_CHOSEN) if world.leader else _NOT_CHOSEN, world)
    if size == _NOT_CHOSEN:
        chosen = _choose(config, world, worker, parallel, model)
        if world.leader:
            directory.write_microbatch_size(chosen.microbatch_size)
        publish_once(chosen, runtime, world)
        size = _largest(chosen.microbatch_size, world)  # nobody goes on before it is on storage
    worker.fix_microbatch_size(size)


def _largest(number: int, world: World) -> int:
    return int(gather_numbers(number, world.groups.control).max())


def _choose(
    config: Config, world: World, worker: WorkerState, parallel: Parallel, model: nn.Module
) -> events.MicrobatchChosen:
    """Return the size that fits on every rank, and leaves each worker of the largest world a microbatch."""
    global_size = config.batch.global_size
    num_workers = min(max(config.scaling.num_workers[1], world.size), global_size)
    # Where a forward has run out already, no more samples than these fit.
    most = world.amendments.forward_size or global_size
    if largest_microbatch(global_size, num_workers, most) == 1:
        return events.MicrobatchChosen(microbatch_size=1)
    rooms: list[Any] = [None] * world.size
    dist.all_gather_object(rooms, _measure(world, worker, parallel, model), group=world.groups.control)
    num_fitting, rank = min((room.num_fitting, rank) for rank, room in enumerate(rooms))
    return events.MicrobatchChosen(
        microbatch_size=largest_microbatch(global_size, num_workers, int(min(num_fitting, most))),
        rank=rank,
        sample_bytes=rooms[rank].sample,
        free_bytes=rooms[rank].free,
    )


def _measure(world: World, worker: WorkerState, parallel: Parallel, model: nn.Module) -> Room:
    """Run forwards and backwards of one sample and of two, and leave no trace of them. A collective."""

    def run(num_samples: int) -> None:
        batch = worker.loader.example(num_samples)
        try:
            # Several microbatches add up whole gradients under sharding, and the sum of a step frees them. Where
            # gradients have memory of their own there is nothing to be seen of a sum.
            for last in (False, True) if world.shard > 1 else (False,):
                with parallel.synchronize(model, last):
                    with worker.precision.autocast():
                        loss_sum = worker.task.loss(model, batch).loss_sum
                    worker.precision.backward(loss_sum)
                    del loss_sum
            world.groups.gate()
        except torch.OutOfMemoryError as error:
            raise smaller(num_samples, error) from error
        finally:
            parallel.clear_gradients(worker.optimizer)

    device = worker.precision.device
    buffers = Buffers(model)
    with ExitStack() as unchanged:
        unchanged.enter_context(buffers.undone_on_failure())
        unchanged.enter_context(buffers.undone())
        # Dropout and code of the user's own draw from them.
        unchanged.enter_context(torch.random.fork_rng([device], enabled=device.type == "cuda"))
        unchanged.enter_context(own_randomness(0))
        peaks = _peaks_on_gpu(run, device) if device.type == "cuda" else _peaks_on_cpu(run)
    return Room(*peaks, _free_bytes(world, device))


def _peaks_on_gpu(run: Callable[[int], None], device: torch.device) -> tuple[int, int]:
    """Return the most bytes that `run` takes for one sample, and for two."""
    run(1)  # what libraries set aside in their first call stays
    peaks = []
    for num_samples in (1, 2):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run(num_samples)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    torch.cuda.empty_cache()  # of blocks for one and two samples
    return peaks[0], peaks[1]


def _peaks_on_cpu(run: Callable[[int], None]) -> tuple[int, int]:
    """Return the same, of tensors alone: what operators take for a moment is not known."""
    peaks = []
    with Allocations() as allocations:
        run(1)  # what is there already is seen here for the first time
        for num_samples in (1, 2):
            before = allocations.peak_bytes = allocations.bytes
            run(num_samples)
            peaks.append(allocations.peak_bytes - before)
    return peaks[0], peaks[1]


def _free_bytes(world: World, device: torch.device) -> int:
    """Return the bytes that are free for this rank. A collective on CPUs, where workers share those of a machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator holds and nobody uses is free too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    nodes: list[Any] = [None] * world.size
    dist.all_gather_object(nodes, world.node, group=world.groups.control)
    return free_bytes() // nodes.count(world.node)
