"""Driver of a run on Ray, which runs the trainer and shows events."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from steadfast.config import Config, RecoveryConfig
from steadfast.errors import SteadfastError, TrainingError, UsageError, shortened
from steadfast.guards.failures import FailureKind
from steadfast.orchestration.backend import SlotConfig
from steadfast.orchestration.cluster import WARNINGS_REMEDY
from steadfast.orchestration.coordinator import Coordinator
from steadfast.orchestration.fork_worker import python_of_cluster
from steadfast.orchestration.internals import dead_processes, is_embedded, without_idle_actors
from steadfast.orchestration.internals.slots import InlineFunction, coordinator_name, slot_controller
from steadfast.orchestration.membership import Membership
from steadfast.orchestration.objects import Objects
from steadfast.orchestration.policies import Budgets
from steadfast.orchestration.reach import answers
from steadfast.orchestration.worker_runtime import WorkerSpec, train_loop
from steadfast.run.directory import RunDirectory
from steadfast.run.events import AttemptStarted, Failure, Finished, Notice, ProcessRestarted, Scale
from steadfast.run.interrupts import EXIT_STOPPED, Interrupts
from steadfast.run.owner import Ownership
from steadfast.storage import arrow_filesystem
from steadfast.telemetry.console import Console
from steadfast.units import plural

_POLL_S = 0.2  # time between two updates of the console
_ASK_S = 1.0  # time between two checks of a cluster's head
_AWAY_S = 15.0  # a head that does not answer for this time counts as dead; Ray ends the cluster's workers after 60 s
_SAVE_S = 30.0  # time for the workers to write a checkpoint after a part of Ray has died
_REMEDY = "Give the same command again: it goes on from the newest checkpoint. -v shows Ray's own messages"
_OWN_PYTHON = {"conda", "container", "image_uri", "pip", "py_executable", "uv"}  # keys that choose another Python
_CLOSE_S = 30.0  # time for the last events to reach storage


class SlotTrainer(TorchTrainer):
    """Trainer whose controller uses a worker group of slots, without Ray Train's unused actors."""

    def _create_default_callbacks(self) -> list[Any]:
        return without_idle_actors(super()._create_default_callbacks())

    def _initialize_and_run_controller(self, train_fn_ref: Any, **arguments: Any) -> Any:
        with slot_controller(is_embedded()):
            return super()._initialize_and_run_controller(train_fn_ref=InlineFunction(train_fn_ref), **arguments)


def start_coordinator(
    recovery: RecoveryConfig, membership: Membership, directory: RunDirectory, ownership: Ownership
) -> Any:
    """Start the run's coordinator on the head node. Return its handle."""
    # The head node outlives the nodes of workers. A few calls of each worker may wait at once, all for a bounded time.
    # When the actor dies, Ray starts it again and repeats the pending calls.
    for_ever = {"max_restarts": -1, "max_task_retries": -1}
    head = {"node:__internal_head__": 0.001}
    actor = ray.remote(num_cpus=0, max_concurrency=100_000, resources=head, **for_ever)(Coordinator)
    named = actor.options(name=coordinator_name(_run_config(directory)))
    return named.remote(recovery, membership, directory, ownership)


class HeadDied(TrainingError):
    """Raised when the cluster has no living head node."""


def head_host() -> str:
    """Return the address of the head node, on which the coordinator runs.

    Raises HeadDied if no living node of the cluster is the head.
    """
    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return str(node["NodeManagerAddress"])
    raise HeadDied("the cluster's head node is dead. Start it again (ray up FILE, or ray start --head). " + _REMEDY)


def build_trainer(
    config: Config, directory: RunDirectory, coordinator: Any, gpus: int, objects: Objects
) -> TorchTrainer:
    """Return the run's trainer, with `gpus` GPUs for each worker."""
    scaling = config.scaling
    resources = {"CPU": scaling.cpus_per_worker}
    if gpus:
        resources["GPU"] = gpus
    spec = WorkerSpec(config, directory, coordinator, head_host(), Path.cwd(), objects)
    # Ray would restore its own list of checkpoints from this file. A run resumes from its manifests alone.
    directory.store.delete("checkpoint_manager_snapshot.json")
    return SlotTrainer(
        partial(train_loop, spec),
        torch_config=SlotConfig(),
        scaling_config=ScalingConfig(
            num_workers=scaling.num_workers[1],
            use_gpu=gpus > 0,
            resources_per_worker=resources,
            placement_strategy=scaling.placement.upper(),
            label_selector=dict(scaling.label_selector) or None,
        ),
        run_config=_run_config(directory, _runtime_env(config)),
    )


def _runtime_env(config: Config) -> dict[str, Any]:
    """Return the runtime environment of workers, beside that of the run."""
    # A server would import packages before `cluster.pip` has installed others. Without `py_modules`, Python could not
    # find the program that starts a fork.
    given = ray.get_runtime_context().runtime_env
    if sys.platform != "linux" or config.cluster.pip:
        return {}
    if "py_modules" not in given or _OWN_PYTHON & given.keys():
        return {}
    return {"py_executable": python_of_cluster(config.scaling.cpus_per_worker)}


def _run_config(directory: RunDirectory, runtime_env: dict[str, Any] | None = None) -> RunConfig:
    files, path = arrow_filesystem(directory.store)
    folder, _, name = path.rpartition("/")
    return RunConfig(
        name=name,
        storage_path=folder,
        storage_filesystem=files,
        failure_config=FailureConfig(max_failures=0),  # Ray only sees failures that the run does not survive
        worker_runtime_env=runtime_env,
        checkpoint_config=CheckpointConfig(),  # keeps all checkpoints, because the run deletes old ones itself
    )


class RayDied(TrainingError):
    """Raised when Ray has died during a run.

    The command may start again.

    Args:
        what: the part of Ray that has died.
        step: the last finished step.
        num_workers: bounds that `steadfast scale` has set, if it did.
        cluster: address of the cluster's GCS; "" if Ray is embedded in the command.
    """

    def __init__(self, what: str, step: int, num_workers: tuple[int, int] | None, cluster: str) -> None:
        super().__init__(f"{what} has died. {_REMEDY}")
        self.what = what
        self.step = step
        self.num_workers = num_workers
        self.cluster = cluster


@dataclass
class Fit:
    """One call of `trainer.fit()` with a display of the run's events.

    If Ray's controller dies, the call is repeated with a new trainer.
    """

    build: Callable[[], TorchTrainer]  # builds a new trainer for each start of Ray's controller
    coordinator: Any
    directory: RunDirectory
    console: Console
    interrupts: Interrupts
    expected: int  # number of workers that the cluster has room for
    max_failures: int  # allowed deaths of the controller in a row, without a new step between two deaths
    cluster: str  # address of the cluster's GCS; "" if Ray is embedded
    only_saves: bool  # whether to stop as soon as the workers have restored the newest state
    over: bool = False  # whether the run has trained and ended, so that copies in node memory are no longer needed
    _num_shown: int = 0  # number of kept events that were shown
    _asked: Any = None  # the pending call for events
    _answered_s: float = 0.0  # time of the last answer of the cluster's GCS
    _saving_until_s: float | None = None  # end of the time in which workers save, after a part of Ray has died
    _num_workers: tuple[int, int] | None = None  # bounds that `steadfast scale` has set
    _stop_reason: str = ""  # reason of a stop that is not published yet
    _trains: bool = False  # whether the workers have restored a state and finished a step
    _thread: threading.Thread | None = None  # thread of the newest trainer
    _error: BaseException | None = None  # error of Ray
    _fatal: Failure | None = None  # fatal failure of a worker or the coordinator
    _summary: Mapping[str, Any] | None = None

    def result(self) -> int:
        """Train until the run ends, and return the exit code.

        Raises:
            SteadfastError: the training failed.
            RayDied: a part of Ray has died, and the command may start again.
        """
        self.interrupts.on_stop = self._say_stopping
        self.interrupts.check()
        self.console.stage(f"starting {plural(self.expected, 'worker')}")
        budgets = Budgets({"controller": self.max_failures})
        self._fit()
        while self._error is not None and self._is_of_controller(self._error):
            if exceeded := budgets.spend("controller", self.directory.last_step()):
                raise TrainingError(f"Ray's controller keeps dying: {exceeded}. {_REMEDY}")
            follows = "another one starts, and workers with it"
            self.coordinator.publish.remote(ProcessRestarted(process="Ray's controller", follows=follows))
            self._error = None
            self._fit()
        self.over = self._trains
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self.coordinator.close.remote(), timeout=_CLOSE_S)

        if self._fatal is not None:
            raise self._explained(self._fatal)
        if isinstance(self._error, SteadfastError):
            raise self._error  # its message has a remedy
        if self._error is not None:
            raise TrainingError(_in_short(self._error)) from self._error
        if self._summary is not None and self._summary["status"] == "finished":
            return 0
        if self._summary is None and not self._stopping:
            raise TrainingError("the workers ended without a result; -v shows Ray's own messages")
        return EXIT_STOPPED

    def end(self) -> None:
        """End the actors of the run, for a process and a Ray that go on."""
        # The name of the coordinator must be free for the next call, and the coordinator would renew the claim on the
        # run. Without a coordinator workers end, and so does Ray's controller, if the run has not ended yet.
        ray.kill(self.coordinator)
        ask = self.coordinator.heartbeat_port.options(max_task_retries=0)
        with contextlib.suppress(ray.exceptions.RayError):
            while True:
                ray.get(ask.remote(), timeout=_CLOSE_S)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    @property
    def _stopping(self) -> bool:
        # With `only_saves` the stop waits for the first step. Workers that receive a stop before they are in a world
        # have restored no state, so they would end without saving one.
        return self.interrupts.stopping or (self.only_saves and self._trains)

    def _fit(self) -> None:
        """Run a new trainer until the trainer or its controller ends. Raises RayDied."""
        # The trainer runs in another thread, because this thread handles signals and shows events.
        self._thread = thread = threading.Thread(target=self._run_trainer, daemon=True, name="fit")
        thread.start()
        while thread.is_alive():
            self._show_events()
            self._check_ray()
            thread.join(_POLL_S)
        self._check_ray(ended=True)
        if isinstance(self._error, HeadDied) and not self.cluster:
            self._raise_ray_died("Ray's raylet")  # a dying raylet leaves the cluster first, so no head is found
        self._show_events()

    def _run_trainer(self) -> None:
        try:
            self.build().fit()
        except BaseException as error:
            self._error = error

    def _is_of_controller(self, error: BaseException) -> bool:
        if not isinstance(error, ray.exceptions.RayActorError) or self._fatal is not None:
            return False
        # The workers have ended with the controller. If the run stops, there is nothing left to save, and no other
        # controller is started.
        return not self._stopping and self._summary is None

    def _check_ray(self, ended: bool = False) -> None:
        """Raise RayDied if a part of Ray has died and the workers have saved, or the trainer has `ended`."""
        dead = dead_processes()
        if "raylet" in dead:  # all workers of the raylet end too, so none of them can save
            self._raise_ray_died("Ray's raylet")
        what = "Ray's GCS" if "gcs_server" in dead else ""
        if self.cluster and not self._cluster_answers():
            what = f"the head of the cluster, {self.cluster},"
        if not what:
            return
        # Workers live for a minute after the death of the GCS.
        if ended:
            self._raise_ray_died(what)
        elif self._saving_until_s is None:
            self._saving_until_s = time.monotonic() + _SAVE_S
            self.console.line(f"{what} has died: the workers save their state")
        elif self._summary is not None or time.monotonic() > self._saving_until_s:
            self._raise_ray_died(what)

    def _cluster_answers(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._answered_s > _ASK_S and answers(self.cluster):
            self._answered_s = now_s
        self._answered_s = self._answered_s or now_s
        # A GCS with external storage may be restarted soon, so one missing answer is not enough.
        return now_s - self._answered_s < _AWAY_S

    def _raise_ray_died(self, what: str) -> None:
        if self._stopping and self._summary is not None:
            return  # the run has stopped, as the user asked
        raise RayDied(what, self.directory.last_step(), self._num_workers, self.cluster)

    def _explained(self, failure: Failure) -> SteadfastError:
        if failure.kind not in (FailureKind.OURS, FailureKind.DEVICE):
            # The failure has no traceback if a budget was exceeded or the workers could not communicate.
            told = failure.traceback or failure.error
            if not failure.traceback and failure.node:
                told = f"{failure.line()}. {failure.budget or _REMEDY}"
            if not self.console.verbose:
                told = shortened(told)
            return TrainingError(told)
        # Before the first step such an error means bad input, which is a usage error. Later the training has failed.
        if self.directory.last_step():
            return TrainingError(failure.error)
        return UsageError(failure.error)

    def _say_stopping(self, reason: str) -> None:
        self.console.line("stopping after this step; Ctrl-C again to stop at once")
        self._stop_reason = reason

    def _show_events(self) -> None:
        # While Ray restarts the coordinator, this call stays pending. So the pending call is kept instead of a new one.
        if self._stop_reason:  # published here, because a signal handler may interrupt another call of Ray
            self.coordinator.publish.remote(Notice(text=f"{self._stop_reason}: the run stops after this step"))
            self._stop_reason = ""
        stop = self._stopping or self._saving_until_s is not None
        asked = self._asked or self.coordinator.events.remote(self._num_shown, stop)
        answered, _ = ray.wait([asked], timeout=_POLL_S)
        self._asked = None if answered else asked
        if not answered:
            return
        try:
            events = ray.get(asked)
        except ray.exceptions.RayError:
            return  # `_check_ray` and the trainer report what has died
        for event in events:
            self._num_shown += event.kept
            if isinstance(event, Scale):
                self._num_workers = event.after
            if isinstance(event, AttemptStarted):
                self._trains = True
            if isinstance(event, Finished):
                self._summary = event.summary
                if self._saving_until_s is not None and not self._stopping:
                    continue
                curves = self.directory.curves()
                self.console.finish({**event.summary, "tensorboard": curves})
            elif isinstance(event, Failure) and event.fatal:
                self._fatal = event
            else:
                self.console.show(event)


def _in_short(error: BaseException) -> str:
    """Return the cause of a Ray error in one line, with the remedy."""
    first, *_ = str(error).splitlines() or [""]
    if isinstance(error, Warning):
        return f"{type(error).__name__}: {first}. {WARNINGS_REMEDY}"
    if isinstance(error, ray.train.WorkerGroupError):
        # The first line only says that a worker has failed. The last line of the worker's traceback names the cause.
        for failure in error.worker_failures.values():
            first = (str(failure).strip().splitlines() or [first])[-1]
    return f"{type(error).__name__}: {first.rstrip('. ')}. {_REMEDY}"
