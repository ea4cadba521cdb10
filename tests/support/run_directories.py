"""Run directories as a run leaves them, and the events that lead there."""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from steadfast.config import Config
from steadfast.run import events
from steadfast.run.directory import EVENTS, METRICS, STEPS, RunDirectory
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from steadfast.storage.documents import write_json
from steadfast.storage.jsonl import Line, open_stream
from tests.support.events import attempt_started

NOW_S = time.time()
PARTS = {"formed_s": 0.2, "built_s": 0.1, "restored_s": 0.1, "first_step_s": 0.1}
FIRST = attempt_started(time_s=NOW_S - 50, world_size=3, detected_s=5.0, **PARTS)
SECOND = attempt_started(
    2, time_s=NOW_S - 30, step=90, source="rank 1", detected_s=1.5, nodes={"a" * 56: (0, 1)}, **PARTS
)
LOST = events.Failure(time_s=NOW_S - 31, attempt=1, error="reset", kind="worker", member="m1", node="0123456789")
ENDED = events.AttemptEnded(time_s=NOW_S - 31, attempt=1, cause="worker lost", step=90)
LOG = events.Log(
    time_s=NOW_S - 10,
    attempt=2,
    step=100,
    total_steps=400,
    loss=2.5,
    lr=1e-3,
    grad_norm=1.0,
    unit="tok",
    memory_bytes=2**30,
    world_size=2,
    step_ms=20.0,
    units_per_s=39_800.0,
    samples_per_s=10.0,
    eta_s=600.0,
    at_risk={"worker": 0, "everything": 40},
)


def run_at(path: Path, pid: int, *told: events.Event, renewed: float | None = None) -> RunDirectory:
    """Write the directory of a run that process `pid` owns, with these events."""
    store = LocalStore(path)
    owner = {"attempt": 2, "token": "t", "host": os.uname().nodename, "pid": pid, "renewed": renewed or time.time()}
    write_json(store, "owner.json", owner)
    for name, lines in (
        (EVENTS, [event.to_line() for event in told]),
        (METRICS, [LOG.to_line()]),
        (STEPS, [{"step": 100, "attempt": 2, "num_samples": 8, "step_s": 0.02, "time_s": NOW_S - 10}]),
    ):
        write_lines(RunDirectory(store), lines, name)
    return RunDirectory(store)


def write_lines(directory: RunDirectory, lines: Sequence[Line], name: str = STEPS) -> None:
    with closing(open_stream(directory.store, name)) as stream:
        stream.write(lines)


def started() -> events.RunStarted:
    return events.RunStarted(time_s=NOW_S - 60, launcher="ray")


def write_as_a_command(config: Config) -> RunDirectory:
    """Write what a command leaves in a run directory that a drill does not: an owner that is gone, and the config."""
    directory = RunDirectory.of(config)
    Ownership.claim(directory.store).release()
    directory.write_config(config)
    return directory


def shrink_forwards(config: Config, forward_size: int) -> None:
    """Have a run that begins remember that no more samples than these fit into a forward."""
    directory = RunDirectory.of(config)
    directory.check_writable()
    directory.record(events.ForwardsShrunk(step=1, forward_size=forward_size, error="before"))
