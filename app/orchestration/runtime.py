"""The Ray implementation of `Runtime`, and the function that Ray Train runs in every worker."""

from __future__ import annotations

import threading
import traceback
import uuid
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import torch.distributed as dist

from app.config import Config
from app.errors import SteadfastError
from app.groups import FORM_TIMEOUT, PeerLost, is_peer_loss
from app.orchestration.coordinator import Failure, Seat
from app.orchestration.internals.slots import report
from app.orchestration.lifeline import Lifeline, Orders
from app.rundir import RunDirectory
from app.runtime import Event, Signals, World, form_world, local_device

_REGISTER_S = 10.0  # how long the end of a run waits for Ray's book-keeping


@dataclass(frozen=True)
class Job:
    """What the driver hands to every worker.

    slots: workers survive the death of others; else Ray decides who the workers are and replaces all of them.
    silence_s: how long a heartbeat may be late.
    """

    config: Config
    directory: RunDirectory
    coordinator: Any  # handle of the Coordinator actor
    coordinator_host: str
    slots: bool
    silence_s: float


class RayRuntime:
    """One worker of a Ray Train worker group, in world after world."""

    def __init__(self, job: Job) -> None:
        self.device = local_device()
        self._job, self._coordinator = job, job.coordinator
        self._member = uuid.uuid4().hex[:8]
        self._actor = ray.get_runtime_context().current_actor
        self._group_size = None if job.slots else ray.train.get_context().get_world_size()
        self._orders = Orders()
        self._world: World | None = None
        self._registrar: Registrar | None = None
        port = ray.get(self._coordinator.lifeline_port.remote())
        self._lifeline = Lifeline(job.coordinator_host, port, self._member, job.silence_s, self._heard)

    def next_world(self) -> World | None:
        self._world = None
        while True:
            seat: Seat | None = ray.get(self._coordinator.join.remote(self._member, self._actor, self._group_size))
            if seat is None:
                return None
            try:
                self._world = self._form(seat)
            except PeerLost as error:
                self.failed(0, error)
                continue
            if self._orders.aborted == seat.attempt:  # it was told while there was nothing to abort
                self._world.groups.abort()
            return self._world

    def signals(self) -> Signals:
        leave = self._world is not None and self._orders.leave == self._world.attempt
        return Signals(stop=self._orders.stop, leave=leave)

    def publish(self, event: Event) -> None:
        self._coordinator.publish.remote(event)
        if event["event"] == "checkpoint" and self._job.slots:
            report(event["path"], {"step": event["step"]})

    def failed(self, step: int, error: BaseException) -> None:
        kind = "peer" if is_peer_loss(error) else "ours" if isinstance(error, SteadfastError) else "user"
        message = str(error) if kind == "ours" else f"{type(error).__name__}: {error}"
        failure = Failure(kind, step, message, "".join(traceback.format_exception(error)))
        over = ray.get(self._coordinator.failed.remote(self._member, failure))
        if not self._job.slots:
            self.close()
            if not over:
                raise error  # Ray restarts the group
        if over and kind != "peer":
            raise error

    def close(self) -> None:
        if self._registrar is not None:
            self._registrar.close()
        ray.get(self._coordinator.leave.remote(self._member))
        self._lifeline.close()

    def _form(self, seat: Seat) -> World:
        try:
            store = dist.TCPStore(self._job.coordinator_host, seat.store_port, None, False, timeout=FORM_TIMEOUT)
        except RuntimeError as error:
            raise PeerLost(f"the store of attempt {seat.attempt} does not answer: {error}") from error
        world = form_world(store, seat.rank, seat.size, seat.attempt, self.device)
        if not self._job.slots:
            self._registrar = Registrar(self._coordinator, world)
        return world

    def _heard(self, orders: Orders | None) -> None:
        """On the lifeline's thread."""
        world = self._world
        if orders is None:  # the coordinator is gone, or took this worker for dead: nobody waits for what it does
            if world is not None:
                world.groups.abort()
            return
        self._orders = orders
        if world is not None and orders.aborted == world.attempt:
            world.groups.abort()


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

    runtime = RayRuntime(job)
    work(job.config, runtime, job.directory)
    runtime.close()
    return "done"  # Ray Train tells by it that a slot has ended rather than not begun
