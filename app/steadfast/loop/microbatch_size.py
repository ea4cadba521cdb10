"""Choice of the microbatch size by measurement, for `batch.microbatch_size: auto`.

Results depend on the size. So the size is written to storage before the first step, and later attempts, in other worlds
or on other GPUs, read it from there. Microbatches that do not fit then run in parts (app/steadfast/data/parts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from steadfast.checkpoint.memory_server import free_bytes
from steadfast.data.randomness import own_randomness
from steadfast.guards.out_of_memory import halve_microbatch
from steadfast.loop.side_effects import undone
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import Parallel
from steadfast.plan import largest_microbatch
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Notice
from steadfast.units import size
from steadfast.world.allocations import Allocations
from steadfast.world.control import gather_numbers, gather_objects
from steadfast.world.runtime import Runtime, World, publish_once

# Share of the free memory to use. The rest is for samples longer than the first two, and for fragmentation of the
# allocator. Running out of memory costs an attempt, and from then on two forwards in place of one.
_USED_SHARE = 0.8
_NOT_CHOSEN = 0  # sent in place of a size
_CHOSEN = "batch.microbatch_size auto -> {} for the whole run"


class Room(NamedTuple):
    """Measured memory of a rank, in bytes beyond the state between steps."""

    one: int  # peak of a forward and backward of one sample
    two: int  # of two samples
    free: int

    @property
    def sample(self) -> int:
        """Return the bytes of one more sample."""
        return self.two - self.one

    @property
    def num_fitting(self) -> float:
        """Return how many samples fit, at least the one tried."""
        if self.sample <= 0:
            return math.inf
        fixed = max(0, self.one - self.sample)
        return max(1, (_USED_SHARE * self.free - fixed) // self.sample)


@dataclass(frozen=True)
class SizeSearch:
    """Search for the microbatch size, by training on a few samples without side effects.

    The state has been restored already, and does not change.
    """

    worker: WorkerState
    world: World
    parallel: Parallel
    model: nn.Module

    def fix(self, directory: RunDirectory, runtime: Runtime) -> None:
        """Agree on the size of a microbatch: recorded, or chosen now. A collective.

        Raises:
            OutOfMemory: two samples do not fit; the next attempt runs one sample per forward.
            TrainingError: one sample does not fit.
            StorageError: the chosen size cannot be read or written.
        """
        num_samples = self._known_size(directory)
        if num_samples == _NOT_CHOSEN:
            chosen, event = self._choose()
            if self.world.leader:
                directory.write_microbatch_size(chosen)
            publish_once(event, runtime, self.world)
            # No rank continues before the size is on storage, because a failure after the first steps could otherwise
            # lead to another size.
            num_samples = _largest(chosen, self.world)
        self.worker.fix_microbatch_size(num_samples)

    def _known_size(self, directory: RunDirectory) -> int:
        """Return the size that a worker knows, or else the recorded one. A collective."""
        known = self.worker.batch.microbatch_size
        if known == "auto":
            known = _NOT_CHOSEN
        num_samples = _largest(known, self.world)
        if num_samples != _NOT_CHOSEN:
            return num_samples
        recorded = None
        # Only the leader asks storage, which may answer the ranks differently.
        if self.world.leader:
            recorded = directory.microbatch_size()
        return _largest(recorded or _NOT_CHOSEN, self.world)

    def _choose(self) -> tuple[int, Notice]:
        """Return the size that fits on every rank and occupies all workers, and the event that reports the size."""
        world, config = self.world, self.worker.config
        global_size = config.batch.global_size
        # The size stays when the world grows, so a step needs a microbatch for each worker of the largest world.
        num_workers = min(max(config.scaling.num_workers[1], world.size), global_size)
        # If a forward has run out of memory before, no more samples than these fit.
        most = world.amendments.forward_size or global_size
        if largest_microbatch(global_size, num_workers, most) == 1:
            return 1, Notice(event="microbatch_chosen", text=_CHOSEN.format(1), microbatch_size=1)
        rooms = gather_objects(_measure(world, self.worker, self.parallel, self.model), world.groups.control)
        num_fitting, rank = min((room.num_fitting, rank) for rank, room in enumerate(rooms))
        chosen = largest_microbatch(global_size, num_workers, int(min(num_fitting, most)))
        sample, free = rooms[rank].sample, rooms[rank].free
        reason = f"a sample takes {size(sample)} of the {size(free)} free on rank {rank}"
        return chosen, Notice(
            event="microbatch_chosen",
            text=f"{_CHOSEN.format(chosen)} | {reason}",
            microbatch_size=chosen,
            rank=rank,
            sample_bytes=sample,
            free_bytes=free,
        )


def _largest(number: int, world: World) -> int:
    return int(gather_numbers(number, world.groups.control).max())


def _measure(world: World, worker: WorkerState, parallel: Parallel, model: nn.Module) -> Room:
    """Measure forwards and backwards of one and two samples, without side effects.

    A collective.
    """

    def run(num_samples: int) -> None:
        batch = worker.loader.example(num_samples)
        try:
            # Under sharding, several microbatches accumulate unsharded gradients, which the sum of a step frees.
            # Gradients with memory of their own show no such difference, so one pass is enough.
            for last in (False, True) if world.replica_size > 1 else (False,):
                with parallel.synchronize(model, last):
                    with worker.precision.autocast():
                        loss_sum = worker.task.loss(model, batch).loss_sum
                    worker.precision.backward(loss_sum)
                    del loss_sum
            world.groups.gate()
        except torch.OutOfMemoryError as error:
            raise halve_microbatch(num_samples, error) from error
        finally:
            parallel.clear_gradients(worker.optimizer)

    device = worker.precision.device
    with ExitStack() as unchanged:
        unchanged.enter_context(undone(model, worker.task))
        # Dropout and user code draw from the generators.
        unchanged.enter_context(torch.random.fork_rng([device], enabled=device.type == "cuda"))
        unchanged.enter_context(own_randomness(0))
        peaks = _peaks_on_gpu(run, device) if device.type == "cuda" else _peaks_on_cpu(run)
    return Room(*peaks, _free_bytes(world, device))


def _peaks_on_gpu(run: Callable[[int], None], device: torch.device) -> tuple[int, int]:
    """Return the peak bytes of `run` for one and for two samples."""
    run(1)  # memory that libraries reserve in their first call stays allocated
    peaks = []
    for num_samples in (1, 2):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run(num_samples)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    torch.cuda.empty_cache()  # frees the cached blocks of one and two samples
    return peaks[0], peaks[1]


def _peaks_on_cpu(run: Callable[[int], None]) -> tuple[int, int]:
    """Return the peak bytes of tensors; operators' temporary memory is unknown."""
    peaks = []
    with Allocations() as allocations:
        run(1)  # registers the tensors that exist already
        for num_samples in (1, 2):
            before = allocations.peak_bytes = allocations.bytes
            run(num_samples)
            peaks.append(allocations.peak_bytes - before)
    return peaks[0], peaks[1]


def _free_bytes(world: World, device: torch.device) -> int:
    """Return the bytes free for this rank; a collective on CPUs."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Unused memory that the allocator has reserved is free too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    nodes = gather_objects(world.node, world.groups.control)
    return free_bytes() // nodes.count(world.node)
