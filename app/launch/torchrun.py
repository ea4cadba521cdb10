"""Train under plain torchrun, which says what the world is and restarts what fails."""

import json
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from app.config import Config
from app.errors import SteadfastError
from app.launch.resume import start_or_resume
from app.run.directory import RunDirectory
from app.run.events import Event, Failure
from app.run.interrupts import EXIT_STOPPED, Interrupts
from app.run.owner import Ownership
from app.telemetry.console import Console
from app.worker import work
from app.world.device import torchrun_device
from app.world.runtime import Signals, World, form_world

# What torchrun calls a run that the user has not named. A restart of it cannot be told from another command.
_NO_RUN_ID = "none"


class TorchrunRuntime:
    """A `Runtime` of one world. A failure ends the process, and torchrun starts another."""

    def __init__(
        self, device: torch.device, form: Callable[[], World], directory: RunDirectory, console: Console
    ) -> None:
        self.device = device
        self._form = form
        self._events = directory.open_events()
        self._console = console
        self._formed = False
        self._stop = False

    def next_world(self) -> World | None:
        if self._formed or self._stop:
            return None
        self._formed = True
        return self._form()

    def request_stop(self) -> None:
        self._stop = True

    def signals(self) -> Signals:
        return Signals(stop=self._stop)

    def publish(self, event: Event) -> None:
        event = event.stamped()
        self._events.write(event)
        self._console.show(event)

    def failed(self, step: int, error: BaseException) -> None:
        self.publish(Failure(step=step, error=f"{type(error).__name__}: {error}"))
        # Not swallowed: torchrun restarts only what has exited.
        raise error

    def close(self) -> None:
        self._events.close()


def run_under_torchrun(config: Config, started_s: float, verbose: bool) -> int:
    """Run this process's part of the training, and return its exit code: that of rank 0 if rank 0 refuses."""
    device = torchrun_device(config.scaling.gpus_per_worker)  # first, so that nobody waits for a rank that has none
    store, rank, world_size = next(dist.rendezvous("env://"))
    directory = RunDirectory.of(config)
    ownership = None
    with closing(Console(verbose)) as console:
        # torchrun keeps one store over its restarts: without their count, an answer to a former life would be read.
        key = f"intent-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if rank == 0:
            try:
                ownership, answer = _claim(config, directory, console, started_s)
            except SteadfastError as error:
                store.set(key, json.dumps({"code": error.exit_code}))
                raise
            store.set(key, json.dumps(answer))
        answer = json.loads(store.get(key))
        if "code" in answer:
            return int(answer["code"])

        skip = frozenset(answer["skip"])
        form = partial(form_world, store, rank, world_size, answer["attempt"], device, skip)
        runtime = TorchrunRuntime(device, form, directory, console)
        with Interrupts(runtime.request_stop), closing(runtime):
            outcome = work(config, runtime, directory)
        if ownership is not None:
            ownership.release()
            summary = directory.summary()
            if summary:
                console.finish({**summary, "tensorboard": directory / "tensorboard"})

    if outcome is not None and outcome.kind == "finished":
        return 0
    return EXIT_STOPPED


def _claim(
    config: Config, directory: RunDirectory, console: Console, started_s: float
) -> tuple[Ownership | None, dict[str, Any]]:
    """Claim the run and return what all ranks need to know: what the attempt is, or the exit code if there is none."""
    directory.check_writable()
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", _NO_RUN_ID)
    # With a token of its own, a restarted process may claim what the process before it still holds.
    token = None if run_id == _NO_RUN_ID else run_id
    ownership = Ownership.claim(directory.store, token)
    if not start_or_resume(config, directory, "torchrun", started_s, console.line):
        ownership.release()
        return None, {"code": 0}
    ownership.renew_in_background()
    return ownership, {"attempt": ownership.next_attempt(), "skip": sorted(directory.skipped_steps())}
