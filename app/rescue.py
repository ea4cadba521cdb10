"""Save a worker's state when an exception ends the run or the worker."""

import contextlib

from app.checkpoint.parts import Parts
from app.checkpoint.state import State, flatten
from app.checkpoint.writer import Superseded
from app.components.worker_state import WorkerState
from app.config import Config
from app.errors import SteadfastError, StorageError
from app.faults.corruption import Corrupted
from app.faults.numerics import BadStep
from app.faults.out_of_memory import OutOfMemory
from app.parallel import Parallel, build_parallel
from app.parallel.dtensor import local
from app.run import events
from app.run.directory import RunDirectory
from app.world.groups import is_peer_loss
from app.world.runtime import Runtime, World

_LIMIT_S = 60.0  # time in which a checkpoint must be written
# After these errors the state is on storage or with a survivor, or the state cannot be trusted.
_OWN = BadStep | OutOfMemory | SteadfastError
_ENDS = "run-ends"  # key in the store of a world, set to inform the peers of an exception that the run ends


def announce_end(world: World, error: BaseException) -> None:
    """Inform all ranks that an exception of user code ends the run."""
    if not isinstance(error, _OWN | Corrupted) and not is_peer_loss(error):
        with contextlib.suppress(RuntimeError):  # the store is gone
            world.groups.store.set(_ENDS, "")


def rescue(
    config: Config,
    runtime: Runtime,
    world: World,
    worker: WorkerState,
    directory: RunDirectory,
    error: BaseException,
    raised: bool,
) -> None:
    """Write a checkpoint of the newest held step, or record why not.

    Each rank writes its own part of the state. If parts of that step are missing, the ranks write the copies in the
    memory of the nodes.

    Args:
        error: the exception that ended the attempt for this worker.
        raised: whether `Runtime.failed` raised the error. If False, and the worker's own code failed, the run continues
            without this worker; if False, and the worker lost a peer, the run has ended.
    """
    parallel = build_parallel(config.parallel, world, worker.precision)
    is_peer = is_peer_loss(error)
    if is_peer:
        # A run that continues restores the state of survivors or the copies in memory, and needs no checkpoint.
        wanted = not raised or _announced(world) or _stopping(runtime)
    else:
        wanted = _is_trusted(error, world, parallel) and (raised or not parallel.survivors_hold_all)
    step = worker.step
    if not wanted or not step or step == worker.writer.committed:
        return
    ends_run = raised or is_peer
    parts = Parts(config, directory, world, worker.fingerprint, parallel, worker.writer, worker.base)
    reason = ""
    try:
        parts.begin(worker.command)
        state = worker.last_state()
        if not _is_finite(state, worker):
            reason = "some of the weights are not finite"
        elif reason := _save(parts, step, state, world, at_once=not is_peer, others_follow=ends_run):
            memory = worker.memory(directory) if ends_run else None
            if memory is not None and (event := parts.save_copies(memory, state)):
                runtime.publish(event.of_attempt(world.attempt))
    except Superseded:
        return  # the command that has taken over the run may be writing the same steps
    except (StorageError, OSError) as refused:
        reason = str(refused)
    for news in parts.news():
        runtime.publish(news.of_attempt(world.attempt))
    if reason and ends_run:
        runtime.publish(events.NotSaved(attempt=world.attempt, step=step, error=reason))


def _save(parts: Parts, step: int, state: State, world: World, at_once: bool, others_follow: bool) -> str:
    """Save the state of `step` with all ranks; return "" or the obstacle."""
    if world.progress.phase == "update":
        return "the exception came while the weights were being updated"
    if parts.save_part(step, state, _LIMIT_S, at_once, others_follow):
        return ""
    return "the parts of other workers are missing"


def _announced(world: World) -> bool:
    with contextlib.suppress(RuntimeError):  # the store is gone
        return world.groups.store.check([_ENDS])
    return False


def _stopping(runtime: Runtime) -> bool:
    with contextlib.suppress(SteadfastError):  # another command owns the run by now
        return runtime.signals().stop
    return False


def _is_trusted(error: BaseException, world: World, parallel: Parallel) -> bool:
    """Return whether this rank's state is correct after an error.

    The error is not the loss of a peer.
    """
    if isinstance(error, Corrupted):
        # All ranks raise Corrupted. A rank that computed correctly writes, if it holds all of the state.
        return parallel.survivors_hold_all and error.witness == world.rank
    return not isinstance(error, _OWN)


def _is_finite(state: State, worker: WorkerState) -> bool:
    # Only parameters are checked, because a buffer such as a mask may hold infinities.
    names = {name for name, _ in worker.model.named_parameters()}
    learned = [tensor for name, tensor in state["model"].items() if name in names]
    learned += flatten(state.get("optimizer", {})).values()
    return all(bool(local(tensor).isfinite().all()) for tensor in learned)
