"""From a configuration to a running `TorchTrainer`, and back to an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from contextlib import closing
from typing import Any

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from app.config import Config
from app.errors import ResourcesMissing, SteadfastError, TrainingError, UsageError
from app.files import last_line
from app.interrupts import EXIT_STOPPED, Interrupts
from app.orchestration.coordinator import Coordinator
from app.orchestration.internals import hush
from app.orchestration.runtime import Job, train_loop
from app.owner import Ownership
from app.rundir import RunDirectory, prepare
from app.telemetry.console import Console
from app.telemetry.environment import environment
from app.telemetry.narrate import already_finished

# Defaults for Ray's own settings; what the user has set in the environment wins.
_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean what they mean to the user
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # how soon a dead worker is noticed; stock is 2
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
EMBEDDED = "embedded"
_STORE_BYTES = 100 * 2**20  # nothing large travels through Ray's object store


class NoProcessGroups(Backend):
    """Ray starts the workers; the runtime forms the process groups, a new generation for every world."""


class RuntimeConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return NoProcessGroups


def launch(config: Config, started_s: float, verbose: bool) -> int:
    """Runs the training on Ray.

    Returns:
        The exit code: 0 finished, 1 failed, 3 stopped on request.

    Raises:
        UsageError: the command cannot be carried out as given.
        ResourcesMissing: the cluster has no room for the smallest number of workers.
    """
    directory = RunDirectory.of(config)
    directory.create()
    ownership = Ownership.claim(directory.owner)
    with closing(Console(verbose)) as console:
        try:
            intent = prepare(config, directory)
            if intent.finished:
                console.line(already_finished(config, str(directory.path), intent.finished))
                return 0
            for note in intent.notes:
                console.line(note)
            directory.record({"event": "run_started", "time_s": started_s, "launcher": "ray"})
            directory.write_environment(environment())
            return _run(config, directory, ownership, console, verbose)
        finally:
            ownership.release()
            directory.discard_if_unused()


def _run(config: Config, directory: RunDirectory, ownership: Ownership, console: Console, verbose: bool) -> int:
    address = connect(config, verbose)
    try:
        console.line(describe_cluster(address))
        gpus = gpus_per_worker(config)
        await_room(config, gpus, ownership, embedded=address == EMBEDDED)
        coordinator = start_coordinator(config, directory, ownership)
        trainer = build_trainer(config, directory, coordinator, gpus)
        return Fit(trainer, coordinator, directory, console).result()
    finally:
        ray.shutdown()


def connect(config: Config, verbose: bool) -> str:
    """Joins the cluster that the rule of the README names, or embeds one in this process. Returns which."""
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    if not verbose:
        hush()
    quiet: dict[str, Any] = {
        "log_to_driver": verbose,
        "logging_level": logging.INFO if verbose else logging.ERROR,
    }
    address = config.cluster.address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address != "local":
        with contextlib.suppress(ConnectionError) if address == "auto" else contextlib.nullcontext():
            ray.init(address=address, **quiet)
    if not ray.is_initialized():
        needed = config.scaling.min_workers * config.scaling.cpus_per_worker
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, needed),  # more workers than cores is slow, not wrong
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
        address = EMBEDDED
    return address


def describe_cluster(address: str) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    total = ray.cluster_resources()
    return (
        f"Ray: {address}, {len(nodes)} node{'s' * (len(nodes) > 1)}, "
        f"{int(total.get('CPU', 0))} CPUs, {int(total.get('GPU', 0))} GPUs"
    )


def gpus_per_worker(config: Config) -> int:
    wanted = config.scaling.gpus_per_worker
    return (1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0) if wanted == "auto" else wanted


def await_room(config: Config, gpus: int, ownership: Ownership, embedded: bool) -> None:
    """Waits until the smallest number of workers fits; not at all on an embedded cluster, which cannot grow.

    Raises:
        ResourcesMissing: it did not within `scaling.start_timeout_s`; says what is missing.
    """
    scaling = config.scaling
    began, patience = time.monotonic(), 0.0 if embedded else scaling.start_timeout_s
    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fitting = sum(
            int(min(node.get("CPU", 0) // scaling.cpus_per_worker, node.get("GPU", 0) // gpus if gpus else 1e9))
            for node in nodes
        )
        if fitting >= scaling.min_workers:
            return
        if time.monotonic() - began >= patience:
            raise ResourcesMissing(
                f"scaling.num_workers asks for at least {scaling.min_workers} workers of {scaling.cpus_per_worker} CPU "
                f"and {gpus} GPU each, but after {patience:g} s {len(nodes)} node(s) with "
                f"{_sum(nodes, 'CPU')} CPUs and {_sum(nodes, 'GPU')} GPUs have room for {fitting}. "
                "Add nodes, or lower scaling.num_workers or scaling.gpus_per_worker"
            )
        ownership.renew()
        time.sleep(0.5)


def start_coordinator(config: Config, directory: RunDirectory, ownership: Ownership) -> Any:
    """On the head node, which outlives workers' nodes."""
    actor = ray.remote(num_cpus=0, max_concurrency=1000, resources={"node:__internal_head__": 0.001})(Coordinator)
    return actor.remote(directory, ownership, config.recovery.max_failures)


def build_trainer(config: Config, directory: RunDirectory, coordinator: Any, gpus: int) -> TorchTrainer:
    low, high = config.scaling.num_workers
    head = next(node for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
    job = Job(config, directory, coordinator, head["NodeManagerAddress"])
    # Ray reads its own snapshot back if it finds one; what a run resumes from is in our manifests alone.
    (directory / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
    return TorchTrainer(
        train_loop,
        train_loop_config={"job": job},
        torch_config=RuntimeConfig(),
        scaling_config=ScalingConfig(
            num_workers=(low, high) if low < high else low,
            use_gpu=gpus > 0,
            resources_per_worker={"CPU": config.scaling.cpus_per_worker, **({"GPU": gpus} if gpus else {})},
        ),
        run_config=RunConfig(
            name=directory.path.name,
            storage_path=str(directory.path.parent),
            failure_config=FailureConfig(max_failures=config.recovery.max_failures),
            checkpoint_config=CheckpointConfig(),  # keeps all it knows of: retention is ours
        ),
    )


class Fit:
    """`trainer.fit()` in a thread of its own, so that this one can show events and keep the signal handlers."""

    def __init__(self, trainer: TorchTrainer, coordinator: Any, directory: RunDirectory, console: Console) -> None:
        self._trainer, self._coordinator = trainer, coordinator
        self._directory, self._console = directory, console
        self._error: BaseException | None = None
        self._fatal: dict[str, Any] | None = None
        self._finished: dict[str, Any] | None = None
        self._num_shown = 0

    def result(self) -> int:
        """The exit code.

        Raises:
            TrainingError: the training failed.
        """
        thread = threading.Thread(target=self._fit, daemon=True, name="fit")
        with Interrupts(self._request_stop) as interrupts:
            thread.start()
            while thread.is_alive():
                self._show_events()
            self._show_events()
        if self._fatal is not None:
            raise self._explained(self._fatal)
        if self._error is not None:
            raise TrainingError(str(self._error)) from self._error
        if self._finished is None:
            if interrupts.stopping:
                return EXIT_STOPPED
            raise TrainingError("the workers ended without a result; -v shows Ray's own messages")
        self._console.finish({**self._finished, "tensorboard": str(self._directory / "tensorboard")})
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
        return (TrainingError if last_line(self._directory.ledger) else UsageError)(failure["error"])

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
            elif event.get("fatal"):
                self._fatal = event
            else:
                self._console.show({key: value for key, value in event.items() if key != "traceback"})


def _sum(nodes: list[dict[str, float]], resource: str) -> int:
    return int(sum(node.get(resource, 0) for node in nodes))
