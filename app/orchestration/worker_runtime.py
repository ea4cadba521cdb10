"""The worker's side of a run on Ray: its `Runtime`, and the function that Ray Train calls in every worker."""

import os
import socket
import threading
import traceback
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch.distributed as dist

from app.balance.shares import LABEL
from app.config import Config
from app.errors import SteadfastError
from app.faults.corruption import Corrupted
from app.faults.numerics import BadStep
from app.faults.out_of_memory import OutOfMemory
from app.orchestration.heartbeat import Access, Commands, HeartbeatClient, Message
from app.orchestration.internals.slots import report
from app.orchestration.messages import FailureReport, Leave, Member, WorldAssignment
from app.orchestration.packages import install_packages
from app.run.directory import RunDirectory
from app.run.events import Checkpoint, Event
from app.run.interrupts import unblock_sigterm
from app.world.device import assigned_device
from app.world.flight_recorder import FlightRecorder
from app.world.groups import (
    PeerLost,
    is_out_of_memory,
    is_peer_loss,
    prefer_interface_of,
    recover_in_process,
    serve_store,
)
from app.world.progress import Limits, Progress
from app.world.runtime import Signals, World, form_world
from app.world.timeouts import Timeouts


@dataclass(frozen=True)
class WorkerSpec:
    """What the driver hands to every worker, by way of Ray Train."""

    config: Config
    directory: RunDirectory
    coordinator: Any  # handle of the Coordinator actor
    coordinator_host: str
    folder: Path  # the command's working directory


class RayRuntime:
    """Take part in world after world as the coordinator assigns them, and report how they end."""

    outlives_peers: ClassVar[bool] = True  # or Ray ends this process when another worker is lost

    def __init__(self, spec: WorkerSpec) -> None:
        here = ray.get_runtime_context()
        self.device = assigned_device(here.get_accelerator_ids()["GPU"])
        self.leave_reason = Leave.RUN_ENDED  # why there is no next world
        self._host = spec.coordinator_host
        self._coordinator = spec.coordinator
        self._timeouts = Timeouts(spec.config.recovery.silence_s)
        self._progress = Progress(Limits(min(Limits.step_s, spec.config.recovery.stall_s)))
        self._member = Member(uuid.uuid4().hex[:8], here.current_actor, here.get_node_id())
        self._commands = Commands()
        self._attempt = 0
        self._place: WorldAssignment | None = None  # the last one
        self._store: dist.TCPStore | None = None  # of the newest world, if this worker leads it; it ends with this
        self._world: World | None = None
        self._aborted = threading.Event()  # of the newest world, also while it forms

        # What batch.balance may weigh this machine by.
        labels = (os.environ.get(LABEL), *here.get_node_labels().values())
        os.environ[LABEL] = ",".join(filter(None, labels))
        if self.outlives_peers:
            recover_in_process()
        self._flight_recorder = FlightRecorder(spec.config.profile.flight_recorder, self.device.type)

        self._heartbeats = HeartbeatClient(
            self._access(), self._member.name, self._timeouts, self._beat, self._obey, self._find_again
        )
        prefer_interface_of(self._heartbeats.own_address)

    def next_world(self) -> World | None:
        """Return the next world once it has formed; None when this worker is not needed any more."""
        self._world = None
        while self.leave_reason != Leave.RELEASED:
            answer = self._join()
            if isinstance(answer, Leave):
                self.leave_reason = answer
                break
            try:
                self._world = self._form(answer)
            except (PeerLost, RuntimeError) as error:
                # Once the coordinator has missed whoever did not come, it forms a world without them.
                self.failed(0, error)
                continue
            # The command may have come while there was nothing to abort.
            if self._commands.aborted == answer.attempt or self._heartbeats.ended:
                self._world.groups.abort()
            return self._world
        return None

    def signals(self) -> Signals:
        commands = self._commands
        leave = commands.leave == self._attempt
        return Signals(stop=commands.stop, leave=leave, checkpoint=commands.save == self._attempt)

    def publish(self, event: Event) -> None:
        # With its time, by which a coordinator that takes over knows what the last one has written.
        event = event.stamped()
        # What is only shown need not wait for a coordinator that is away.
        publish = self._coordinator.publish if event.kept else self._coordinator.publish.options(max_task_retries=0)
        publish.remote(event)
        if isinstance(event, Checkpoint):
            report(event.path, {"step": event.step})

    def failed(self, step: int, error: BaseException) -> bool:
        """Report why the attempt broke after `step`. Return whether this worker trains on.

        Raises `error` if that ends the run.
        """
        kind, over = self._report(step, error)
        if over and kind != "peer":
            raise error
        is_odd = isinstance(error, Corrupted) and self._place is not None and error.rank == self._place.rank
        if is_odd or kind not in ("peer", "numeric", "smaller", "corruption"):
            self.leave_reason = Leave.RELEASED  # a process that an exception has gone through is not trusted any more
        return not over and self.leave_reason != Leave.RELEASED

    def close(self) -> None:
        """Leave the run."""
        ray.get(self._coordinator.leave.remote(self._member.name))
        self._heartbeats.close()

    def _join(self) -> WorldAssignment | Leave:
        # Not in the coordinator's process, whose death would then be that of the world: sharded checkpoints need it.
        # Nobody knows yet who leads, so each worker brings one.
        host = self._heartbeats.own_address
        store = serve_store(host)
        answer = self._ask(replace(self._member, store=(host, store.port)))
        if not isinstance(answer, WorldAssignment):
            return answer
        if self._heartbeats.ended:
            return Leave.RELEASED  # the coordinator may not know yet that this worker is cut off
        self._place = answer
        self._attempt = answer.attempt
        self._store = store if answer.rank == 0 else None
        if self._commands.aborted == answer.attempt:  # which has come a moment before
            self._store = None
        return answer

    def _ask(self, member: Member) -> WorldAssignment | Leave:
        answer: WorldAssignment | Leave = ray.get(self._coordinator.join.remote(member))
        return answer

    def _access(self, within_s: float | None = None) -> Access:
        port: int = ray.get(self._coordinator.heartbeat_port.remote(), timeout=within_s)
        secret: str = ray.get(self._coordinator.admit.remote(self._member.name), timeout=within_s)
        return Access((self._host, port), secret)

    def _find_again(self, within_s: float) -> Access | None:
        # Ray starts a coordinator that has died again, and until it is there these calls wait.
        try:
            access = self._access(within_s)
            rejoins = self._coordinator.rejoin.remote(self._member, self._place, self._commands)
            return access if ray.get(rejoins, timeout=within_s) else None
        except ray.exceptions.RayError:
            return None

    def _form(self, place: WorldAssignment) -> World:
        self._aborted = threading.Event()
        if self._commands.aborted == place.attempt or self._heartbeats.ended:  # which has come a moment before
            self._aborted.set()
        try:
            # A leader that has died refuses at once, and a TCPStore would go on trying for twice its time-out.
            socket.create_connection(place.store, self._timeouts.silence_s).close()
            store = dist.TCPStore(*place.store, None, False, timeout=self._timeouts.form)
        except (RuntimeError, OSError) as error:
            raise PeerLost(f"the store of attempt {place.attempt} does not answer: {error}") from error
        return form_world(
            store,
            place.rank,
            place.size,
            place.attempt,
            self.device,
            place.amendments,
            self._timeouts,
            self._progress,
            self._member.node,
            self._aborted,
        )

    def _report(self, step: int, error: BaseException) -> tuple[str, bool]:
        # (kind of the failure, whether the run is over)
        kind = _kind(error, self._attempt)
        message = str(error) if kind == "ours" else f"{type(error).__name__}: {error}"
        skip = error.steps if isinstance(error, BadStep) else ()
        lines = "".join(traceback.format_exception(error))
        size = None
        if isinstance(error, OutOfMemory):
            message, size = error.error, error.forward_size
        corrupted = ""
        if isinstance(error, Corrupted) and self._place is not None:
            message, corrupted = error.cause, self._place.members[error.rank]
        failure = FailureReport(kind, self._attempt, step, message, lines, skip, size, corrupted)
        return kind, ray.get(self._coordinator.failed.remote(self._member.name, failure))

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
                self._heartbeats.send(self._beat())  # this process may be ended before the next one is due
            self._commands = commands
        # This is the heartbeats' thread. It looks at the world last: either the world is there, or the training thread,
        # which forms it, looks at the commands afterwards.
        if commands is None or commands.aborted == self._attempt:
            self._store = None  # which frees those who still form it
            self._aborted.set()
        world = self._world
        if world is not None and (commands is None or commands.aborted == world.attempt):
            world.groups.abort()


def _kind(error: BaseException, attempt: int) -> str:
    if isinstance(error, OutOfMemory):
        return "smaller"
    # Before the first attempt there are no peers: a dataset, which may use sockets too, is being built.
    if attempt and is_peer_loss(error):
        return "peer"
    if isinstance(error, SteadfastError):
        return "ours"
    if isinstance(error, BadStep):
        return "numeric"
    if isinstance(error, Corrupted):
        return "corruption"
    if is_out_of_memory(error):
        return "oom"
    return "exception"


def train_loop(runtime_class: type[RayRuntime], spec: WorkerSpec) -> str:
    """Train as one worker of the run. Return its reason to leave, by which a slot knows whether to be filled again."""
    # Not above, because the driver imports this module too, and needs nothing of what trains.
    from app.worker import work

    unblock_sigterm()  # Ray has started this thread, and may have blocked it
    runtime = runtime_class(spec)
    try:
        _settle(spec)
    except Exception as error:
        runtime.failed(0, error)  # which ends the run, or this worker
    else:
        work(spec.config, runtime, spec.directory)
    runtime.close()
    return runtime.leave_reason.value


def _settle(spec: WorkerSpec) -> None:
    """Prepare this process to run the user's code. Raises SteadfastError for what no other worker would do better."""
    # From the working directory that Ray has brought: one of the same name may be older. A node that is going may have
    # deleted it, so nobody asks for its name.
    install_packages(spec.config.cluster.pip, Path())
    if spec.folder.is_dir():  # relative paths mean what they mean to the user, where this node has them
        os.chdir(spec.folder)
    spec.directory.check_shared()
