"""Runtime of a worker on Ray, and Ray Train's training function."""

import os
import socket
import threading
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ray
import torch.distributed as dist

from steadfast.balance.shares import LABEL
from steadfast.config import Config
from steadfast.errors import SteadfastError, as_exception, described, traceback_of
from steadfast.guards.corruption import Corrupted
from steadfast.guards.failures import FailureKind, failure_kind
from steadfast.guards.numerics import BadStep
from steadfast.guards.out_of_memory import OutOfMemory
from steadfast.liveness.flight_recorder import FlightRecorder
from steadfast.orchestration.heartbeat import Access, Commands, HeartbeatClient, Message
from steadfast.orchestration.internals.slots import report
from steadfast.orchestration.messages import FailureReport, Leave, Member, WorldAssignment
from steadfast.orchestration.objects import Objects
from steadfast.orchestration.packages import install_packages
from steadfast.orchestration.user_output import shown_output
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Checkpoint, Event, Output
from steadfast.run.interrupts import unblock_sigterm
from steadfast.world.device import assigned_device, started
from steadfast.world.groups import PeerLost, WorldRank, prefer_interface_of, recover_in_process, serve_store
from steadfast.world.progress import Limits, Progress
from steadfast.world.runtime import Signals, WorkerProcess, World, form_world
from steadfast.world.timeouts import Timeouts

# After an exception of another kind the process may be in a bad state, so the worker ends.
_WORKER_GOES_ON = (FailureKind.PEER, FailureKind.NUMERIC, FailureKind.SMALLER, FailureKind.CORRUPTION)


@dataclass(frozen=True)
class WorkerSpec:
    """Arguments of a worker, which the driver sends through Ray Train."""

    config: Config
    directory: RunDirectory
    coordinator: Any  # handle of the Coordinator actor
    coordinator_host: str
    folder: Path  # the command's working directory
    objects: Objects  # objects that a program gave to `fit`, which `config` lacks until the worker loads them


class RayRuntime:
    """Runtime of a worker that takes part in one world after another.

    The coordinator assigns each world, and the worker reports how the attempt ended.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        here = ray.get_runtime_context()
        self.device = started(assigned_device(here.get_accelerator_ids()["GPU"]))
        self.leave_reason = Leave.RUN_ENDED  # reason why there is no next world
        self.failure: FailureReport | None = None  # reason why this worker cannot join
        self._host = spec.coordinator_host
        self._coordinator = spec.coordinator
        self._timeouts = Timeouts(spec.config.recovery.silence_s)
        # A phase may take at least `step_s`, which must not outlast a shorter `hang_limit_s`.
        self._progress = Progress(Limits(min(Limits.step_s, spec.config.recovery.hang_limit_s)))
        self._member = Member(
            uuid.uuid4().hex[:8],
            here.current_actor,
            here.get_node_id(),
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        self._commands = Commands()
        self._attempt = 0
        self._place: WorldAssignment | None = None  # last assignment
        self._asking: tuple[Member, int] | None = None  # arguments of `Coordinator.ask` while there is no answer
        self._answers: SimpleQueue[WorldAssignment | Leave] = SimpleQueue()
        # Store of the newest world if this worker is its leader. The store ends with this reference.
        self._store: dist.TCPStore | None = None
        self._world: World | None = None
        self._aborted = threading.Event()  # `Groups.aborted` of the newest world, also while the world forms

        # `batch.balance` may give weights to machines by these labels.
        labels = (os.environ.get(LABEL), *here.get_node_labels().values())
        os.environ[LABEL] = ",".join(filter(None, labels))
        recover_in_process()
        self._flight_recorder = FlightRecorder(self.device.type)

        self._heartbeats = HeartbeatClient(
            self._access(), self._timeouts, self._beat, self._obey, self._hear_answer, self._find_again
        )
        prefer_interface_of(self._heartbeats.own_address)

    def next_world(self) -> World | None:
        """Return the next formed world, or None if this worker shall end."""
        self._world = None
        while self.leave_reason != Leave.RELEASED:
            answer = self._join()
            if isinstance(answer, Leave):
                self.leave_reason = answer
                break
            try:
                self._world = self._form(answer)
            except (PeerLost, RuntimeError) as error:
                # The coordinator detects the missing workers by their heartbeats, and forms a world without them.
                self.failed(0, error)
                continue
            # The command to abort may have arrived before there was a world to abort.
            if self._commands.aborted == answer.attempt or self._heartbeats.ended:
                self._world.groups.abort()
            return self._world
        return None

    def signals(self) -> Signals:
        commands = self._commands
        leave = commands.leave == self._attempt
        return Signals(stop=commands.stop, leave=leave, checkpoint=commands.save == self._attempt)

    def publish(self, event: Event) -> None:
        # The event gets its time here. A coordinator that takes over recognises by the time which events are written.
        event = event.stamped()
        publish = self._coordinator.publish
        if not event.kept:
            publish = publish.options(max_task_retries=0)  # dropped while the coordinator is restarted
        publish.remote(event)
        if isinstance(event, Checkpoint):
            report(event.path, {"step": event.step})

    def show_output(self, lines: list[str]) -> None:
        """Show lines that user code has written on the command's console."""
        rank = None if self._place is None else self._place.rank
        self.publish(Output(member=self._member.name, rank=rank, lines=tuple(lines)))

    def failed(self, step: int, error: BaseException) -> bool:
        """Report why the attempt broke after `step`. Return whether this worker goes on.

        Raises `error` if the failure ends the run. The slot reports a failure before the first world.
        """
        report = _failure_report(error, self._attempt, step)
        if not self._attempt:
            self.failure = report
            return False
        kind, over = report.kind, ray.get(self._coordinator.failed.remote(self._member.name, report))
        if over and kind is not FailureKind.PEER:
            raise error
        is_odd = isinstance(error, Corrupted) and self._place is not None and error.rank == self._place.rank
        if is_odd or kind not in _WORKER_GOES_ON:
            self.leave_reason = Leave.RELEASED
        return not over and self.leave_reason != Leave.RELEASED

    def close(self) -> None:
        """Leave the run."""
        ray.get(self._coordinator.leave.remote(self._member.name))
        self._heartbeats.close()

    def _join(self) -> WorldAssignment | Leave:
        # Sharded checkpoints need the store during the whole attempt. If the coordinator served the store, its death
        # would end the world, so the leader serves the store. The leader is not known yet, so each worker opens one.
        host = self._heartbeats.own_address
        store = serve_store(host)
        answer = self._ask(replace(self._member, store=(host, store.port)))
        if not isinstance(answer, WorldAssignment):
            return answer
        if self._heartbeats.ended:
            return Leave.RELEASED  # this worker is cut off, and the coordinator may not know that yet
        self._place = answer
        self._attempt = answer.attempt
        self._store = store if answer.rank == 0 else None
        # The command to abort may have arrived before the assignment. It is read after the store is set, so that either
        # this thread or that of the heartbeats ends the store.
        if self._commands.aborted == answer.attempt:
            self._store = None
        return answer

    def _ask(self, member: Member) -> WorldAssignment | Leave:
        self._asking = member, self._attempt
        ray.get(self._coordinator.ask.remote(*self._asking))
        return self._answers.get()

    def _hear_answer(self, line: Any) -> None:
        # An answer may come again after a lost connection. This runs in the thread of the heartbeats, as `_find_again`
        # does, so that a new coordinator is asked only while there is no answer.
        if self._asking is None:
            return
        answer: WorldAssignment | Leave
        if isinstance(line, str):
            answer = Leave(line)
        else:
            answer = WorldAssignment.of_line(line)
            if answer.attempt <= self._asking[1]:
                return
            self._place = answer  # which `_find_again` reports
            self._heartbeats.adapt_to(answer.size)
        self._asking = None
        self._answers.put(answer)

    def _access(self, within_s: float | None = None) -> Access:
        port: int = ray.get(self._coordinator.heartbeat_port.remote(), timeout=within_s)
        secret: str = ray.get(self._coordinator.admit.remote(self._member.name), timeout=within_s)
        return Access((self._host, port), self._member.name, secret)

    def _find_again(self, within_s: float) -> Access | None:
        # Ray restarts a coordinator that has died. These calls wait until the new coordinator runs.
        try:
            access = self._access(within_s)
            rejoins = self._coordinator.rejoin.remote(self._member, self._place, self._commands)
            if not ray.get(rejoins, timeout=within_s):
                return None
            if self._asking is not None:
                self._coordinator.ask.remote(*self._asking)
            return access
        except ray.exceptions.RayError:
            return None

    def _form(self, place: WorldAssignment) -> World:
        self._aborted = threading.Event()
        if self._commands.aborted == place.attempt or self._heartbeats.ended:  # before this event was there
            self._aborted.set()
        try:
            # The machine of a dead leader refuses a plain connection at once. TCPStore would try again for twice its
            # time-out.
            socket.create_connection(place.store, self._timeouts.silence_s).close()
            store = dist.TCPStore(*place.store, None, False, timeout=self._timeouts.form)
        except (RuntimeError, OSError) as error:
            raise PeerLost(f"the store of attempt {place.attempt} does not answer: {error}") from error
        own = WorldRank(place.rank, place.size, place.attempt)
        process = WorkerProcess(self.device, self._timeouts, self._progress, self._member.node)
        return form_world(store, own, process, place.amendments, self._aborted)

    def _beat(self) -> Message:
        message: Message = {"progress": asdict(self._progress.report())}
        if collectives := self._flight_recorder.take():
            message["collectives"] = collectives
        return message

    def _obey(self, commands: Commands | None) -> None:
        if commands is not None:
            if commands.dump == self._attempt != self._commands.dump:
                self._heartbeats.send({"stacks": self._progress.stacks()})
                self._flight_recorder.read()
                self._heartbeats.send(self._beat())  # this process may be killed before the next heartbeat is due
            self._commands = commands
        # This runs in the thread of the heartbeats. It sets the commands first and reads the world last, and the
        # training thread forms the world first and reads the commands last. So one of the two aborts the world.
        if commands is None or commands.aborted == self._attempt:
            self._store = None  # ending the store frees members that still form the world
            self._aborted.set()  # ends NCCL's first collectives
        if commands is None:
            self._answers.put(Leave.RELEASED)  # no answer can come any more
        world = self._world
        if world is not None and (commands is None or commands.aborted == world.attempt):
            world.groups.abort()


def _failure_report(error: BaseException, attempt: int, step: int) -> FailureReport:
    kind = failure_kind(error, has_peers=attempt > 0)
    message = str(error) if isinstance(error, SteadfastError) else described(error)
    failure = FailureReport(kind, attempt, step, message, traceback_of(as_exception(error)))
    if isinstance(error, BadStep):
        failure = replace(failure, skip=error.steps)
    elif isinstance(error, OutOfMemory):
        failure = replace(failure, message=error.error, forward_size=error.forward_size)
    elif isinstance(error, Corrupted):
        failure = replace(failure, message=error.cause, corrupted=error.rank)
    return failure


def train_loop(spec: WorkerSpec) -> str | FailureReport:
    """Train as one worker, and return its reason to leave, or why it could not join.

    The slot reads the result to decide whether another worker is needed.
    """
    unblock_sigterm()  # Ray has started this thread, and may have blocked the signal
    try:
        # Imported here, because the driver imports this module too and does not need the training code.
        from steadfast.worker import work

        runtime = RayRuntime(spec)
    except Exception as error:
        return _failure_report(error, attempt=0, step=0)
    with shown_output(runtime.show_output):
        try:
            _settle(spec)
        except Exception as error:
            runtime.failed(0, error)
        else:
            work(spec.config, runtime, spec.directory)
    runtime.close()
    return runtime.failure or runtime.leave_reason.value


def _settle(spec: WorkerSpec) -> None:
    """Prepare this process to run the user's code."""
    # The current directory is Ray's copy of the user's working directory. A directory on this node with the name of the
    # user's own may be older. The current directory is not resolved, because a node that is about to go may have
    # deleted it.
    install_packages(spec.config.cluster.pip, Path())
    if spec.folder.is_dir():  # so that relative paths mean the user's files, if this node has them
        os.chdir(spec.folder)
    spec.directory.check_shared()
    spec.objects.give_to(spec.config)
