"""The Ray implementation of `Runtime`, and the function that Ray Train runs in every worker."""

from __future__ import annotations

import os
import threading
import traceback
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist

from app.balance import LABEL
from app.config import Config
from app.errors import SteadfastError
from app.faults.numerics import BadStep
from app.faults.watchdog import Limits, Progress
from app.groups import PeerLost, interface_of, is_peer_loss
from app.orchestration.internals.slots import report
from app.orchestration.lifeline import Lifeline, Message, Orders
from app.orchestration.messages import Dismissal, Failure, Member, Seat
from app.rundir import RunDirectory
from app.runtime import Event, Signals, World, form_world, local_device
from app.timeouts import Timeouts

_REGISTER_S = 10.0  # how long the end of a run waits for Ray's book-keeping


@dataclass(frozen=True)
class Job:
    """What the driver hands to every worker.

    slots: workers survive the death of others; else Ray decides who the workers are and replaces all of them.
    """

    config: Config
    directory: RunDirectory
    coordinator: Any  # handle of the Coordinator actor
    coordinator_host: str
    folder: Path  # the command's working directory
    slots: bool


class RayRuntime:
    """One worker of a Ray Train worker group, in world after world.

    dismissal: why there is no next world.
    """

    def __init__(self, job: Job) -> None:
        self.device = local_device()
        self.dismissal = Dismissal.DONE
        self._job, self._coordinator = job, job.coordinator
        self._timeouts = Timeouts(job.config.recovery.silence_s)
        here = ray.get_runtime_context()
        labels = (os.environ.get(LABEL), *here.get_node_labels().values())
        os.environ[LABEL] = ",".join(filter(None, labels))  # what batch.balance may weigh this machine by
        if job.slots and job.config.parallel.kind == "ddp":
            # The host waits for gradients before it updates weights: what an aborted NCCL leaves in them is garbage,
            # which a survivor must not take into the state that it brings along.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        self._member = Member(uuid.uuid4().hex[:8], here.current_actor, here.get_node_id())
        self._group_size = None if job.slots else ray.train.get_context().get_world_size()
        self._progress = Progress(Limits(job.config.recovery.stall_s))
        self._orders = Orders()
        self._world: World | None = None
        self._attempt = 0
        self._registrar: Registrar | None = None
        address = (job.coordinator_host, ray.get(self._coordinator.lifeline_port.remote()))
        self._lifeline = Lifeline(address, self._member.name, self._timeouts, self._beat, self._heard)
        # What a host's own name leads to is often its loopback, and that is where gloo would listen.
        if interface := interface_of(self._lifeline.own_address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def next_world(self) -> World | None:
        self._world = None
        while self.dismissal != Dismissal.LEFT:
            seat = ray.get(self._coordinator.join.remote(self._member, self._group_size))
            if isinstance(seat, Dismissal):
                self.dismissal = seat
                break
            if self._job.slots and self._lifeline.ended:  # the coordinator may not know yet
                self.dismissal = Dismissal.LEFT
                break
            self._attempt = seat.attempt
            try:
                self._world = self._form(seat)
            except PeerLost as error:
                self.failed(0, error)
                continue
            if self._orders.aborted == seat.attempt or self._lifeline.ended:  # told while there was nothing to abort
                self._world.groups.abort()
            return self._world
        return None

    def signals(self) -> Signals:
        orders = self._orders
        return Signals(stop=orders.stop, leave=orders.leave == self._attempt, checkpoint=orders.save == self._attempt)

    def publish(self, event: Event) -> None:
        self._coordinator.publish.remote(event)
        if event["event"] == "checkpoint" and self._job.slots:
            report(event["path"], {"step": event["step"]})

    def failed(self, step: int, error: BaseException) -> None:
        kind = _kind(error)
        message = str(error) if kind == "ours" else f"{type(error).__name__}: {error}"
        skip = error.steps if isinstance(error, BadStep) else ()
        failure = Failure(kind, self._attempt, step, message, "".join(traceback.format_exception(error)), skip)
        over = ray.get(self._coordinator.failed.remote(self._member.name, failure))
        if not self._job.slots:
            self.close()
            if not over:
                raise error  # Ray restarts the group
        if over and kind != "peer":
            raise error
        if kind not in ("peer", "numeric"):
            self.dismissal = Dismissal.LEFT  # a process that an exception has gone through is not trusted any more

    def close(self) -> None:
        if self._registrar is not None:
            self._registrar.close()
        ray.get(self._coordinator.leave.remote(self._member.name))
        self._lifeline.close()

    def _form(self, seat: Seat) -> World:
        host, patience = self._job.coordinator_host, self._timeouts.form
        try:
            store = dist.TCPStore(host, seat.store_port, None, False, timeout=patience)
        except RuntimeError as error:
            raise PeerLost(f"the store of attempt {seat.attempt} does not answer: {error}") from error
        world = form_world(
            store,
            seat.rank,
            seat.size,
            seat.attempt,
            self.device,
            seat.skip,
            self._timeouts,
            self._progress,
            self._member.node,
        )
        if not self._job.slots:
            self._registrar = Registrar(self._coordinator, world)
        return world

    def _beat(self) -> Message:
        return {"progress": asdict(self._progress.snapshot())}

    def _heard(self, orders: Orders | None) -> None:
        """On the lifeline's thread."""
        if orders is not None:
            if orders.dump == self._attempt != self._orders.dump:
                self._lifeline.say({"stacks": self._progress.stacks()})
            self._orders = orders
        world = self._world  # looked at last: either it is there, or whoever makes it sees the orders
        if world is not None and (orders is None or orders.aborted == world.attempt):
            world.groups.abort()  # None: the coordinator is gone, or took this worker for dead


def _kind(error: BaseException) -> str:
    if is_peer_loss(error):
        return "peer"
    if isinstance(error, SteadfastError):
        return "ours"
    if isinstance(error, BadStep):
        return "numeric"
    return "oom" if isinstance(error, MemoryError | torch.OutOfMemoryError) else "exception"


class Registrar:
    """Tells Ray Train of commits, so that `Result.checkpoint` is the last one. Nothing waits for it or reads it back.

    `ray.train.report` is a barrier of all ranks and answers at the controller's next poll, so it is called from a
    thread, once a commit, in the order that the coordinator gives to all ranks alike.
    """

    def __init__(self, coordinator: Any, world: World) -> None:
        self._coordinator, self._world = coordinator, world
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._register, daemon=True, name="registrar")
        self._thread.start()

    def close(self) -> None:
        """Gives the last commit the chance to be registered."""
        self._closing.set()
        self._thread.join(_REGISTER_S)

    def _register(self) -> None:
        number = 0
        while True:
            closing = self._closing.is_set()  # before asking: a commit made before close() is still found
            event = ray.get(self._coordinator.registration.remote(self._world.attempt, number))
            if event is not None:
                _report(event, self._world)
                number += 1
            elif closing:
                return


def _report(event: Event, world: World) -> None:
    checkpoint = ray.train.Checkpoint(event["path"]) if world.leader else None
    ray.train.report(
        {"step": event["step"]},
        checkpoint=checkpoint,
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def train_loop(job: Job) -> str:
    """`train_loop_per_worker` of the TorchTrainer."""
    from app.worker import work

    if job.folder.is_dir():  # relative paths mean what they mean to the user, where this node has them
        os.chdir(job.folder)
    runtime = RayRuntime(job)
    try:
        job.directory.check_shared()
    except SteadfastError as error:
        runtime.failed(0, error)  # which ends the run
    work(job.config, runtime, job.directory)
    runtime.close()
    return runtime.dismissal.value  # by it a slot knows whether to ask for another worker
