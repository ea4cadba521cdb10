"""Save a worker's state when an exception ends the run or the worker."""

import contextlib
from dataclasses import dataclass

from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.durable import Fingerprints
from steadfast.checkpoint.parts import Parts
from steadfast.checkpoint.state import State, flatten
from steadfast.checkpoint.writer import Superseded
from steadfast.errors import SteadfastError, StorageError
from steadfast.guards.corruption import Corrupted
from steadfast.guards.failures import FailureKind, failure_kind
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import Parallel, build_parallel
from steadfast.parallel.dtensor import local
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Notice
from steadfast.world.runtime import Runtime, World

_LIMIT_S = 60.0  # time in which a checkpoint must be written
# After a failure of another kind the state is on storage or with a survivor, or the state cannot be trusted.
_OF_USER_CODE = (FailureKind.EXCEPTION, FailureKind.OUT_OF_MEMORY)
_ENDS = "run-ends"  # key in the store of a world, set to inform the peers of an exception that the run ends


def announce_end(world: World, error: BaseException) -> None:
    """Inform all ranks that an exception of user code ends the run."""
    if failure_kind(error) in _OF_USER_CODE:
        with contextlib.suppress(RuntimeError):  # the store is gone
            world.groups.store.set(_ENDS, "")


@dataclass(frozen=True)
class Rescue:
    """Saves the state of a worker after an exception."""

    runtime: Runtime
    worker: WorkerState
    directory: RunDirectory

    def save(self, world: World, error: BaseException, raised: bool) -> None:
        """Write a checkpoint of the newest held step, or record why not.

        Each rank writes its own part of the state. If parts of that step are missing, the ranks write the copies in the
        memory of the nodes.

        Args:
            error: the exception that ended the attempt for this worker.
            raised: whether `Runtime.failed` raised the error. If False, and the worker's own code failed, the run
                continues without this worker; if False, and the worker lost a peer, the run has ended.
        """
        worker = self.worker
        parallel = build_parallel(worker.config.parallel, world, worker.precision)
        is_peer = failure_kind(error) is FailureKind.PEER
        if is_peer:
            # A run that continues restores the state of survivors or the copies in memory, and needs no checkpoint.
            wanted = not raised or _announced(world) or _stopping(self.runtime)
        else:
            # Under DDP a run that continues has the same state on its survivors, so this worker's is not needed.
            wanted = _is_trusted(error, world, parallel) and (raised or not parallel.survivors_hold_all)
        step = worker.step
        if not wanted or not step or step == worker.writer.committed:
            return
        ends_run = raised or is_peer
        catalog = Catalog(self.directory.store, worker.config.checkpoint)
        fingerprints = Fingerprints(worker.fingerprint, worker.base)
        parts = Parts(catalog, world, parallel, worker.writer, fingerprints)
        try:
            parts.begin(worker.command)
            state = worker.last_state()
            if _is_finite(state, worker):
                # The rank that raised commits first. The others have lost it as a peer, and wait for its commit.
                reason = _save(parts, step, state, at_once=not is_peer, others_follow=ends_run)
                if reason and ends_run:
                    self._save_copies(parts, state)
            else:
                reason = "some of the weights are not finite"
        except Superseded:
            return  # the command that has taken over the run may be writing the same steps
        except (StorageError, OSError) as refused:
            reason = str(refused)
        for news in parts.news():
            self.runtime.publish(news.of_attempt(world.attempt))
        if reason and ends_run:
            text = f"the run ends without a checkpoint of step {step}: {reason}"
            self.runtime.publish(Notice(attempt=world.attempt, event="not_saved", text=text, step=step, error=reason))

    def _save_copies(self, parts: Parts, state: State) -> None:
        memory = self.worker.memory(self.directory)
        if memory is None:
            return
        event = parts.save_copies(memory, state)
        if event is not None:
            self.runtime.publish(event.of_attempt(parts.world.attempt))


def _save(parts: Parts, step: int, state: State, at_once: bool, others_follow: bool) -> str:
    """Save the state of `step` with all ranks; return "" or the obstacle."""
    # An optimizer writes the weights one after another, so an interrupted update leaves a mixture of two steps.
    if parts.world.progress.phase == "update":
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
    return failure_kind(error) in _OF_USER_CODE


def _is_finite(state: State, worker: WorkerState) -> bool:
    # Only parameters are checked, because a buffer such as a mask may hold infinities.
    weights = state["model"]
    learned = list(flatten(state.get("optimizer", {})).values())
    for name, _ in worker.model.named_parameters():
        if name in weights:
            learned.append(weights[name])
    return all(bool(local(tensor).isfinite().all()) for tensor in learned)
