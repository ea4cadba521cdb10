"""Record of allocations before a GPU ran out of memory, for https://pytorch.org/memory_viz."""

import logging

import torch

from app.config import ProfileConfig
from app.run.directory import PROFILE, RunDirectory
from app.run.events import MemoryHistory
from app.telemetry.spool import Spool
from app.world.runtime import World

_log = logging.getLogger(__name__)


def record_memory_history(config: ProfileConfig, device: torch.device) -> None:
    """Make CUDA's allocator record its last allocations, if configured."""
    if device.type == "cuda" and config.memory_history:
        # Recording C++ stacks as well would take many times as long.
        torch.cuda.memory._record_memory_history(max_entries=config.memory_history, stacks="python")


def write_memory_history(
    config: ProfileConfig, directory: RunDirectory, world: World, device: torch.device, error: BaseException
) -> MemoryHistory | None:
    """Write the recorded allocations if `error` is an out-of-memory error of the GPU.

    Return the event to publish, None if nothing was written.
    """
    out_of_memory = any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__cause__))
    if device.type != "cuda" or not config.memory_history or not out_of_memory:
        return None
    name = f"memory-attempt-{world.attempt}-rank-{world.rank}.pickle"
    try:
        spool = Spool(directory.store, PROFILE)
        spool.path.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(spool.path / name))
        spool.close()
    except (OSError, RuntimeError, MemoryError) as failed:
        _log.warning("cannot write the memory history of rank %s: %s", world.rank, failed)
        return None
    return MemoryHistory(rank=world.rank, path=directory / f"{PROFILE}/{name}").of_attempt(world.attempt)
