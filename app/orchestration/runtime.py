"""The Ray implementation of `Runtime`, and the function that Ray Train runs in every worker."""

from __future__ import annotations

import threading
import traceback
import uuid
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import ray.train.collective
import torch.distributed as dist

from app.config import Config
from app.errors import SteadfastError
from app.groups import FORM_TIMEOUT, is_peer_loss
from app.orchestration.coordinator import Failure, Seat
from app.rundir import RunDirectory
from app.runtime import Event, Signals, World, form_world, local_device

_REGISTER_S = 10.0  # how long the end of a run waits for Ray's book-keeping


@dataclass(frozen=True)
class Job:
    """What the driver hands to every worker."""

    config: Config
    directory: RunDirectory
    coordinator: Any  # handle of the Coordinator actor
    coordinator_host: str


class RayRuntime:
    """One worker of a stock Ray Train worker group (`recovery.mode: restart`).

    Ray decides who the workers are: a process has one world, and when that breaks Ray replaces all of them.
    """

    def __init__(self, job: Job) -> None:
        self.device = local_device()
        self._job, self._coordinator = job, job.coordinator
        context = ray.train.get_context()
        self._rank, self._size = context.get_world_rank(), context.get_world_size()
        # All workers of one group, and none of an earlier one, know this name.
        self._group: str = ray.train.collective.broadcast_from_rank_zero(uuid.uuid4().hex)
        self._signals = Signals()
        self._registrar: Registrar | None = None
        threading.Thread(target=self._listen, daemon=True, name="signals").start()

    def next_world(self) -> World | None:
        seat: Seat | None = ray.get(self._coordinator.join.remote(self._group, self._rank, self._size))
        if seat is None:
            return None
        store = dist.TCPStore(self._job.coordinator_host, seat.store_port, None, False, timeout=FORM_TIMEOUT)
        world = form_world(store, seat.rank, seat.size, seat.attempt, self.device)
        self._registrar = Registrar(self._coordinator, world)
        return world

    def signals(self) -> Signals:
        return self._signals

    def publish(self, event: Event) -> None:
        self._coordinator.publish.remote(event)

    def failed(self, step: int, error: BaseException) -> None:
        kind = "peer" if is_peer_loss(error) else "ours" if isinstance(error, SteadfastError) else "user"
        message = str(error) if kind == "ours" else f"{type(error).__name__}: {error}"
        failure = Failure(kind, step, message, "".join(traceback.format_exception(error)))
        if not ray.get(self._coordinator.failed.remote(self._rank, failure)):
            raise error  # Ray restarts the group

    def close(self) -> None:
        if self._registrar is not None:
            self._registrar.close()

    def _listen(self) -> None:
        while True:
            self._signals = ray.get(self._coordinator.signals.remote(self._signals))


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


def train_loop(job: Job) -> None:
    """`train_loop_per_worker` of the TorchTrainer."""
    from app.worker import work

    runtime = RayRuntime(job)
    work(job.config, runtime, job.directory)
    runtime.close()
