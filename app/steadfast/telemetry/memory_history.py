"""Record of allocations before a GPU ran out of memory, for https://pytorch.org/memory_viz."""

import logging

import torch

from steadfast.config import ProfileConfig
from steadfast.run.directory import PROFILE, RunDirectory
from steadfast.run.events import Notice
from steadfast.telemetry.spool import Spool
from steadfast.world.runtime import World

_log = logging.getLogger(__name__)


def record_memory_history(config: ProfileConfig, device: torch.device) -> None:
    """Make CUDA's allocator record its last allocations, if configured."""
    if device.type == "cuda" and config.memory_history:
        # Recording C++ stacks as well would take many times as long.
        torch.cuda.memory._record_memory_history(max_entries=config.memory_history, stacks="python")


def write_memory_history(
    config: ProfileConfig, directory: RunDirectory, world: World, device: torch.device, error: BaseException
) -> Notice | None:
    """Write the recorded allocations if `error` is an out-of-memory error of the GPU.

    Return the event to publish, None if nothing was written.
    """
    if device.type != "cuda" or not config.memory_history:
        return None
    # A step that runs out of memory raises another exception from torch's, which then is the cause.
    if not isinstance(error, torch.OutOfMemoryError) and not isinstance(error.__cause__, torch.OutOfMemoryError):
        return None
    name = f"memory-attempt-{world.attempt}-rank-{world.rank}.pickle"
    try:
        spool = Spool(directory.store, PROFILE)
        spool.path.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(spool.path / name))
        spool.close()
    # The caller reports the error of the step next, and another error would hide it.
    except (OSError, RuntimeError, MemoryError) as failed:
        _log.warning("cannot write the memory history of rank %s: %s", world.rank, failed)
        return None
    path = directory / f"{PROFILE}/{name}"
    text = f"rank {world.rank} ran out of memory; its last allocations are in {path}: open it on pytorch.org/memory_viz"
    return Notice(attempt=world.attempt, event="memory_history", text=text, rank=world.rank, path=path)
