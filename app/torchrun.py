"""The same run under plain torchrun: the world is what torchrun says, and torchrun restarts what fails."""

from __future__ import annotations

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
from app.interrupts import EXIT_STOPPED, Interrupts
from app.owner import Ownership
from app.rundir import RunDirectory, begin, stamped
from app.runtime import Event, Signals, World, form_world, local_device
from app.telemetry.console import Console
from app.worker import work

_NO_RUN_ID = "none"  # what torchrun calls a run that nobody has named: no name, then, by which to know a command again


class TorchrunRuntime:
    """One world for each life of the process. A failure ends the process, and `--max-restarts` begins another."""

    def __init__(self, form: Callable[[torch.device], World], directory: RunDirectory, console: Console) -> None:
        self.device = local_device()
        self._form, self._events, self._console = form, directory.open_events(), console
        self._stop = self._formed = False

    def next_world(self) -> World | None:
        if self._formed or self._stop:
            return None
        self._formed = True
        return self._form(self.device)

    def request_stop(self) -> None:
        self._stop = True

    def signals(self) -> Signals:
        return Signals(stop=self._stop)

    def publish(self, event: Event) -> None:
        event = stamped(event)
        if event["event"] != "log":
            self._events.write([event])
        self._console.show(event)

    def close(self) -> None:
        self._events.close()

    def failed(self, step: int, error: BaseException) -> None:
        self.publish({"event": "failure", "step": step, "error": f"{type(error).__name__}: {error}"})
        raise error


def run_under_torchrun(config: Config, started_s: float, verbose: bool) -> int:
    """This process's part of the run. Returns the exit code; rank 0 decides for all what the command means."""
    store, rank, world_size = next(dist.rendezvous("env://"))
    key = f"intent-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    directory = RunDirectory.of(config)
    ownership: Ownership | None = None
    with closing(Console(verbose)) as console:
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
        form = partial(form_world, store, rank, world_size, answer["attempt"], skip=frozenset(answer["skip"]))
        runtime = TorchrunRuntime(form, directory, console)
        with Interrupts(runtime.request_stop), closing(runtime):
            outcome = work(config, runtime, directory)
        if ownership is not None:
            ownership.release()
            if summary := directory.summary():
                console.finish({**summary, "tensorboard": directory / "tensorboard"})
    return 0 if outcome is not None and outcome.kind == "finished" else EXIT_STOPPED


def _claim(
    config: Config, directory: RunDirectory, console: Console, started_s: float
) -> tuple[Ownership | None, dict[str, Any]]:
    directory.create()
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", _NO_RUN_ID)
    ownership = Ownership.claim(directory.store, None if run_id == _NO_RUN_ID else run_id)
    if not begin(config, directory, "torchrun", started_s, console.line):
        ownership.release()
        return None, {"code": 0}
    ownership.keep()
    return ownership, {"attempt": ownership.next_attempt(), "skip": sorted(directory.skipped_steps())}
