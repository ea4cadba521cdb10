"""From a configuration to a running `TorchTrainer`, and back to an exit code."""

from __future__ import annotations

import threading
from contextlib import closing
from importlib import import_module

from app.config import Config
from app.interrupts import Interrupts
from app.owner import Ownership
from app.rundir import RunDirectory, begin
from app.telemetry.console import Console


def launch(config: Config, started_s: float, verbose: bool) -> int:
    """Runs the training on Ray.

    Returns:
        The exit code: 0 finished, 1 failed, 3 stopped on request.

    Raises:
        UsageError: the command cannot be carried out as given.
        ResourcesMissing: the cluster has no room for the smallest number of workers.
    """
    directory = RunDirectory.of(config)
    new = directory.create()
    ownership = Ownership.claim(directory.store)
    with closing(Console(verbose)) as console:
        try:
            if not begin(config, directory, "ray", started_s, console.line):
                return 0
            with Interrupts(lambda: console.line("stopping; Ctrl-C again to stop at once")) as interrupts:
                return _run(config, directory, ownership, console, interrupts, verbose)
        finally:
            ownership.release()
            if new:
                directory.discard_if_unused()


def _run(
    config: Config,
    directory: RunDirectory,
    ownership: Ownership,
    console: Console,
    interrupts: Interrupts,
    verbose: bool,
) -> int:
    import ray

    from app.orchestration.cluster import EMBEDDED, await_room, connect, describe_cluster, gpus_per_worker

    # What follows needs torch and Ray Train; their import runs while Ray's processes start.
    importing = threading.Thread(target=import_module, args=("app.orchestration.trainer",))
    importing.start()
    address = connect(config, verbose)
    importing.join()
    interrupts.on_abort = ray.shutdown
    interrupts.install()  # Ray has handlers too
    from app.orchestration.trainer import Fit, build_trainer, start_coordinator, uses_slots

    try:
        console.line(describe_cluster(address))
        embedded = address == EMBEDDED
        gpus = gpus_per_worker(config, embedded)
        expected = await_room(config, gpus, ownership, interrupts, embedded)
        slots, why_not = uses_slots(config)
        if why_not:
            console.line(why_not)
        coordinator = start_coordinator(config, directory, ownership, expected, slots)
        trainer = build_trainer(config, directory, coordinator, gpus, slots)
        return Fit(trainer, coordinator, directory, console, interrupts).result()
    finally:
        ray.shutdown()
