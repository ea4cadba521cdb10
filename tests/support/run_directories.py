"""Run directories as a run leaves them, and the events that lead there."""

from __future__ import annotations

import os
import time
from pathlib import Path

from steadfast.run import events
from steadfast.run.directory import EVENTS, METRICS, STEPS, RunDirectory
from steadfast.storage import LocalStore
from steadfast.storage.documents import write_json
from steadfast.storage.jsonl import open_stream

NOW_S = time.time()
PARTS = {"formed_s": 0.2, "built_s": 0.1, "restored_s": 0.1, "first_step_s": 0.1}
FIRST = events.AttemptStarted(
    time_s=NOW_S - 50, attempt=1, step=0, source="start", world_size=3, detected_s=5.0, **PARTS
)
SECOND = events.AttemptStarted(
    time_s=NOW_S - 30,
    attempt=2,
    step=90,
    source="rank 1",
    world_size=2,
    detected_s=1.5,
    nodes={"a" * 56: (0, 1)},
    **PARTS,
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
        stream = open_stream(store, name)
        stream.write(lines)
        stream.close()
    return RunDirectory(store)


def started() -> events.RunStarted:
    return events.RunStarted(time_s=NOW_S - 60, launcher="ray")
