"""Train under plain torchrun, without Ray."""

import contextlib
import json
import math
import os
import socket
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from steadfast.analysis.report.write import reported
from steadfast.config import Config, ScalingConfig
from steadfast.errors import RunConflict, SteadfastError, TrainingError, described
from steadfast.guards.corruption import NO_RANK, Corrupted
from steadfast.guards.failures import FailureKind, failure_kind
from steadfast.guards.numerics import BadStep
from steadfast.guards.out_of_memory import OutOfMemory
from steadfast.launch.detect import given_s
from steadfast.launch.resume import release_run, start_or_resume
from steadfast.loop.worker_state import WorkerState
from steadfast.plan import Amendments
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Event, Failure, ForwardsShrunk, Notice, RunStarted
from steadfast.run.interrupts import EXIT_STOPPED, Interrupts
from steadfast.run.owner import Ownership
from steadfast.telemetry.console import Console
from steadfast.worker import start_worker, train_in_worlds
from steadfast.world.device import torchrun_device
from steadfast.world.groups import WorldRank, is_peer_loss
from steadfast.world.runtime import Signals, WorkerProcess, World, form_world
from steadfast.world.timeouts import Timeouts

# Keys that only have an effect with Ray, by section.
_RAY_KEYS = {
    "cluster": ("address", "pip"),
    "scaling": ("spares", "cpus_per_worker", "start_timeout_s", "placement", "label_selector"),
    "recovery": ("max_failures", "hang_limit_s"),
}
# Kinds of failures whose events name the rank. All ranks report failures of the other kinds alike.
_OF_ONE_RANK = (FailureKind.EXCEPTION, FailureKind.OUT_OF_MEMORY, FailureKind.PEER)
_QUIET_S = 30.0  # longest time without progress that is not reported
# torchrun's default run id. With it a restart looks like another command.
_NO_RUN_ID = "none"


@dataclass(frozen=True)
class Place:
    """Place of this process in a world without Ray."""

    device: torch.device
    store: dist.Store  # store in which the processes meet
    rank: int = 0
    world_size: int = 1

    @classmethod
    def of_torchrun(cls, gpus_per_worker: Literal["auto"] | int) -> Self:
        """Return the place that torchrun has assigned to this process.

        Raises UsageError if the machine has fewer GPUs than ranks.
        """
        # The device is chosen before the rendezvous, so that no rank waits for a rank without a GPU.
        device = torchrun_device(gpus_per_worker)
        return cls(device, *next(dist.rendezvous("env://")))


@dataclass(frozen=True)
class Command:
    """Command, or call of `fit`, that trains in this process.

    Attributes:
        config: the configuration of the run.
        started_s: Unix time at which this process began.
        given_s: Unix time at which the command was given; torchrun may have restarted this process since then.
        owns_process: as `of_process` in `Interrupts`.
        return_finished: as in `start_or_resume`.
    """

    config: Config
    started_s: float
    given_s: float
    owns_process: bool = True
    return_finished: bool = False


@dataclass(frozen=True)
class Beginning:
    """First attempt of this process, as rank 0 has begun it."""

    attempt: int
    amendments: Amendments
    ownership: Ownership | None = None  # the claim on the run, which only rank 0 holds


@dataclass(frozen=True)
class Ending:
    """Outcome of the training for this process."""

    exit_code: int
    refusal: str = ""  # reason why rank 0 has refused to begin
    worker: WorkerState | None = None  # None if no training was needed


class TorchrunRuntime:
    """Runtime of one world under torchrun.

    A failure ends the process, and torchrun starts another one. A single process may run without torchrun, so it begins
    the attempt after a rollback itself.
    """

    def __init__(
        self, place: Place, timeouts: Timeouts, directory: RunDirectory, console: Console, beginning: Beginning
    ) -> None:
        self.device = place.device
        self._place = place
        # One for all attempts, so that its progress remembers the durations of earlier ones.
        self._process = WorkerProcess(place.device, timeouts)
        self._events = directory.open_events()
        self._console = console
        self._attempt = beginning.attempt
        self._amendments = beginning.amendments
        self._ownership = beginning.ownership
        self._formed = False
        self._rolled_back = False
        self._stop = False
        self._stop_reason = ""  # reason of a stop that is not published yet
        self._closed = threading.Event()
        if place.world_size > 1 and os.environ.get("LOCAL_RANK", "0") == "0":  # one line for each host
            threading.Thread(target=self._watch, args=(timeouts,), daemon=True, name="progress").start()

    def _watch(self, timeouts: Timeouts) -> None:
        """Report once for each phase that this rank makes no progress."""
        reported: list[int] = []
        while not self._closed.wait(1.0):
            progress = self._process.progress.report()
            limit_s = max(_QUIET_S, progress.limit_s or math.inf)
            if progress.seconds > limit_s and progress.position[:3] != reported:
                reported = progress.position[:3]
                wait_min = timeouts.collective.total_seconds() / 60
                self._console.line(
                    f"rank {self._place.rank} on {socket.gethostname()} has waited for {progress.seconds:.0f} s after "
                    f"step {progress.step} ({progress.phase}): another rank hangs, or its host is cut off. The "
                    f"wait may last {wait_min:.0f} min: end the command on all hosts, and give it again"
                )

    def next_world(self) -> World | None:
        # After a rollback a requested stop still needs one more world, which restores the state to stop with.
        if self._formed or (self._stop and not self._rolled_back):
            return None
        self._formed = True
        own = WorldRank(self._place.rank, self._place.world_size, self._attempt)
        return form_world(self._place.store, own, self._process, self._amendments)

    def request_stop(self, reason: str) -> None:
        self._stop = True
        self._stop_reason = reason

    def signals(self) -> Signals:
        if self._ownership is not None and self._ownership.lost:
            raise RunConflict(self._ownership.lost)
        if self._stop_reason and self._place.rank == 0:  # torchrun passes the signal to all ranks
            self.publish(Notice(text=f"{self._stop_reason}: the run stops after this step"))
            self._stop_reason = ""
        return Signals(stop=self._stop)

    def publish(self, event: Event) -> None:
        event = event.stamped()
        self._events.write(event)
        self._console.show(event)

    def failed(self, step: int, error: BaseException) -> bool:
        if isinstance(error, OutOfMemory):  # the processes that torchrun starts next read the size from this event
            size = error.forward_size
            rank = self._place.rank
            self.publish(ForwardsShrunk(step=step + 1, forward_size=size, error=error.error, rank=rank))
        amended = self._amended_by(error)
        # The failure is not shown here, because the end of the command reports it once for all ranks.
        self._events.write(self._failure(step, error, fatal=amended is None))
        if amended is None or self._ownership is None:
            raise error
        self._amendments = amended
        self._attempt = self._ownership.next_attempt()
        self._formed = False
        self._rolled_back = True
        return True

    def _failure(self, step: int, error: BaseException, fatal: bool) -> Failure:
        failure = Failure(step=step, error=described(error), fatal=fatal)
        kind = failure_kind(error)
        if kind not in _OF_ONE_RANK:
            return failure
        own = {"kind": kind, "rank": self._place.rank, "pid": os.getpid(), "host": socket.gethostname()}
        return failure.model_copy(update=own)

    def _amended_by(self, error: BaseException) -> Amendments | None:
        """Return the amendments for the next attempt.

        The result is None if this process cannot go on.
        """
        # Several processes have a launcher that restarts all of them, and it acts only on processes that have exited.
        if self._place.world_size > 1:
            return None
        # A restarted process would read the same amendments from the events.
        match error:
            case BadStep():
                return self._amendments.leaving_out(error.steps)
            case OutOfMemory():
                return replace(self._amendments, forward_size=error.forward_size)
        return None

    def close(self) -> None:
        self._closed.set()
        self._events.close()


def run_under_torchrun(config: Config, started_s: float, console: Console) -> int:
    """Run this process's part of the training, and return the exit code.

    If rank 0 refuses to begin, all ranks return the exit code of rank 0.
    """
    place = Place.of_torchrun(config.scaling.gpus_per_worker)
    try:
        command = Command(config, started_s, given_s(started_s))
        return train_here(command, RunDirectory.of(config), place, console).exit_code
    except Exception as error:
        if not is_peer_loss(error):
            raise
        raise TrainingError(f"another rank is gone, or cannot be reached: {error}") from error


def train_here(command: Command, directory: RunDirectory, place: Place, console: Console) -> Ending:
    """Train in this process. A collective of all processes.

    Raises:
        TrainingError: a step is bad, or a rank computes wrongly, and torchrun must restart the processes.
    """
    config = command.config
    ownership = None
    # torchrun keeps the store when it restarts the processes. The key contains the number of restarts, so that no rank
    # reads the answer of an earlier start.
    key = f"intent-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    try:
        if place.rank == 0:
            try:
                new = directory.check_writable()
                ownership = _claim(directory, console)
                if unused := unused_keys(config, place.world_size):
                    console.line(f"not used without Ray: {', '.join(unused)}")
                answer = _begin(command, directory, ownership, console)
            except SteadfastError as error:
                # The other ranks wait for an answer. Without one they would wait for the time limit of the store, and
                # then report an error of their own.
                place.store.set(key, json.dumps({"code": error.exit_code, "refusal": str(error)}))
                if ownership is not None:
                    release_run(directory, ownership, new)
                    ownership = None  # a release would create the deleted folder again
                raise
            place.store.set(key, json.dumps(answer))
        answer = json.loads(place.store.get(key))
        if "code" in answer:
            return Ending(int(answer["code"]), answer["refusal"])
        beginning = Beginning(answer["attempt"], Amendments.of_line(answer["amendments"]), ownership)
        with contextlib.ExitStack() as stack:
            if place.rank == 0:
                stack.enter_context(reported(config.run, directory, console.line))
            runtime = TorchrunRuntime(place, Timeouts(config.recovery.silence_s), directory, console, beginning)
            ending = _train(command, directory, runtime)
            if place.rank == 0 and (summary := directory.summary()):
                console.finish({**summary, "tensorboard": directory.curves()})
            return ending
    except BadStep as error:
        raise TrainingError(str(error)) from error
    except Corrupted as error:
        todo = "The step was not applied: take that machine out, and give the same command again"
        if error.rank == NO_RANK:
            todo = "Give the same command again: it goes on from the newest checkpoint, on which all ranks agreed"
        raise TrainingError(f"{error}. {todo}") from error
    finally:
        if ownership is not None:
            ownership.release()


def _train(command: Command, directory: RunDirectory, runtime: TorchrunRuntime) -> Ending:
    outcome = None
    with closing(runtime), Interrupts(runtime.request_stop, of_process=command.owns_process):
        worker = start_worker(command.config, runtime)
        if worker is not None:
            with closing(worker.loader):
                outcome = train_in_worlds(runtime, worker, directory)
    if outcome is not None and outcome.kind == "finished":
        return Ending(0, worker=worker)
    return Ending(EXIT_STOPPED, worker=worker)


def unused_keys(config: Config, world_size: int) -> list[str]:
    """Return the configured keys that have no effect without Ray."""
    found: list[str] = []
    if config.scaling.num_workers not in ((world_size, world_size), ScalingConfig().num_workers):
        found.append(f"scaling.num_workers (torchrun starts the workers, here {world_size})")
    for name, keys in _RAY_KEYS.items():
        section = getattr(config, name)
        default = type(section)()
        for key in keys:
            # An exact run uses `cpus_per_worker` as the number of threads, because sums depend on that number.
            is_used = config.run.exact and key == "cpus_per_worker"
            if getattr(section, key) != getattr(default, key) and not is_used:
                found.append(f"{name}.{key}")
    if config.recompute.every is not None and world_size == 1:
        found.append("recompute.every (it needs a second worker)")
    return found


def _claim(directory: RunDirectory, console: Console) -> Ownership:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", _NO_RUN_ID)
    if run_id == _NO_RUN_ID:
        return Ownership.claim(directory.store, say=console.line)
    # All processes of a torchrun use the run id as token, so that a restarted process can claim the run from its
    # predecessor.
    return Ownership.claim(directory.store, run_id, console.line)


def _begun(directory: RunDirectory, started_s: float, command_s: float) -> RunStarted:
    """Return the event that records this start of the run.

    It is a restart (`again`) if the run has recorded something since the command was given.
    """
    # torchrun's number of restarts does not change when a node joins, and the user may give the same run id to the next
    # command. So neither of the two shows whether this is a restart.
    last_s = 0.0
    with contextlib.suppress(OSError):  # `_begin` reports errors of storage
        last_s = float(directory.last_step_line().get("time_s", 0.0))
        for event in directory.all_events():
            last_s = max(last_s, event.time_s or 0.0)
    if last_s >= command_s:
        return RunStarted(time_s=started_s, launcher="torchrun", again=True)
    return RunStarted(time_s=command_s, launcher="torchrun")


def _begin(command: Command, directory: RunDirectory, ownership: Ownership, console: Console) -> dict[str, Any]:
    """Return rank 0's answer: an attempt or an exit code."""
    begun = _begun(directory, command.started_s, command.given_s)
    if not start_or_resume(command.config, directory, begun, console.line, command.return_finished):
        return {"code": 0, "refusal": ""}
    ownership.renew_in_background()
    attempt = ownership.next_attempt()
    return {"attempt": attempt, "amendments": directory.amendments().to_line()}
