"""The `TorchTrainer` of a run, and what the driver does while it fits."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from app.config import Config
from app.errors import SteadfastError, TrainingError, UsageError
from app.interrupts import EXIT_STOPPED, Interrupts
from app.orchestration.backend import RuntimeConfig
from app.orchestration.coordinator import Coordinator
from app.orchestration.internals import without_idle_actors
from app.orchestration.internals.slots import coordinator_name, moved, slot_controller
from app.orchestration.runtime import Job, train_loop
from app.owner import Ownership
from app.rundir import RunDirectory
from app.storage import arrow_filesystem
from app.telemetry.console import Console

_CLOSE_S = 30.0  # for the last events to reach storage


class LeanTrainer(TorchTrainer):
    def _create_default_callbacks(self) -> list[Any]:
        return without_idle_actors(super()._create_default_callbacks())


class SlotTrainer(LeanTrainer):
    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        with slot_controller():
            return super()._initialize_and_run_controller(**arguments)


def uses_slots(config: Config) -> tuple[bool, str | None]:
    """Whether survivors keep running, and why not where that would be the better way.

    Raises:
        UsageError: that is asked for, and this Ray cannot.
    """
    mode, reason = config.recovery.mode, moved()
    if mode == "slots" and reason:
        raise UsageError(f"recovery.mode=slots does not work with Ray {ray.__version__}: {reason}. Use restart")
    if mode == "auto" and reason:
        return False, f"recovery.mode=restart: slots do not work with Ray {ray.__version__}: {reason}"
    return mode != "restart", None


def start_coordinator(config: Config, directory: RunDirectory, ownership: Ownership, expected: int, slots: bool) -> Any:
    """On the head node, which outlives workers' nodes."""
    actor = ray.remote(num_cpus=0, max_concurrency=1000, resources={"node:__internal_head__": 0.001})(Coordinator)
    named = actor.options(name=coordinator_name(_run_config(config, directory, slots)))
    return named.remote(config, directory, ownership, expected, slots)


def build_trainer(config: Config, directory: RunDirectory, coordinator: Any, gpus: int, slots: bool) -> TorchTrainer:
    low, high = config.scaling.num_workers
    head = next(node for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
    job = Job(config, directory, coordinator, head["NodeManagerAddress"], Path.cwd(), slots)
    # Ray reads its own snapshot back if it finds one; what a run resumes from is in our manifests alone.
    directory.store.delete("checkpoint_manager_snapshot.json")
    return (SlotTrainer if slots else LeanTrainer)(
        partial(train_loop, job),
        torch_config=RuntimeConfig(slots),
        scaling_config=ScalingConfig(
            num_workers=high if slots or low == high else (low, high),
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": config.scaling.cpus_per_worker, **({"GPU": gpus} if gpus else {})},
            placement_strategy=config.scaling.placement.upper(),
            label_selector=dict(config.scaling.label_selector) or None,
        ),
        run_config=_run_config(config, directory, slots),
    )


def _run_config(config: Config, directory: RunDirectory, slots: bool) -> RunConfig:
    files, path = arrow_filesystem(directory.store)
    folder, _, name = path.rpartition("/")
    return RunConfig(
        name=name,
        storage_path=folder,
        storage_filesystem=files,
        # With slots only what the run does not survive gets as far as Ray.
        failure_config=FailureConfig(max_failures=0 if slots else config.recovery.max_failures),
        checkpoint_config=CheckpointConfig(),  # keeps all it knows of: retention is ours
    )


class Fit:
    """`trainer.fit()` in a thread of its own, so that this one can show events and keep the signal handlers."""

    def __init__(
        self,
        trainer: TorchTrainer,
        coordinator: Any,
        directory: RunDirectory,
        console: Console,
        interrupts: Interrupts,
    ) -> None:
        self._trainer, self._coordinator = trainer, coordinator
        self._directory, self._console, self._interrupts = directory, console, interrupts
        self._error: BaseException | None = None
        self._fatal: dict[str, Any] | None = None
        self._finished: dict[str, Any] | None = None
        self._num_shown = 0

    def result(self) -> int:
        """The exit code.

        Raises:
            TrainingError: the training failed.
        """
        self._interrupts.on_stop = self._request_stop
        self._interrupts.check()
        thread = threading.Thread(target=self._fit, daemon=True, name="fit")
        thread.start()
        while thread.is_alive():
            self._show_events()
        self._show_events()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._coordinator.close.remote(), timeout=_CLOSE_S)
        if self._fatal is not None:
            raise self._explained(self._fatal)
        if self._error is not None:
            raise TrainingError(str(self._error)) from self._error
        if self._finished is None:
            if self._interrupts.stopping:
                return EXIT_STOPPED
            raise TrainingError("the workers ended without a result; -v shows Ray's own messages")
        return 0 if self._finished["status"] == "finished" else EXIT_STOPPED

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self._error = error

    def _explained(self, failure: dict[str, Any]) -> SteadfastError:
        """Bad input that is found before the first step is bad usage; after it the training has failed."""
        if failure["kind"] != "ours":
            return TrainingError(failure["traceback"])
        return (TrainingError if self._directory.last_step_line() else UsageError)(failure["error"])

    def _request_stop(self) -> None:
        self._console.line("stopping after this step; Ctrl-C again to stop at once")
        self._coordinator.request_stop.remote()

    def _show_events(self) -> None:
        try:
            events = ray.get(self._coordinator.events.remote(self._num_shown))
        except ray.exceptions.RayError as error:
            raise TrainingError(f"the coordinator is gone: {error}") from error
        self._num_shown += len(events)
        for event in events:
            if event["event"] == "finished":
                self._finished = event
                self._console.finish({**event, "tensorboard": self._directory / "tensorboard"})
            elif event.get("fatal"):
                self._fatal = event
            else:
                self._console.show({key: value for key, value in event.items() if key != "traceback"})
