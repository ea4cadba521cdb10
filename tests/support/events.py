"""Events as scripts read them: the lines of `events.jsonl`."""

from __future__ import annotations

from typing import Any, TypeVar

from steadfast.run import events
from steadfast.run.directory import EVENTS, RunDirectory
from steadfast.run.events import Event
from steadfast.storage.jsonl import read_lines

Kind = TypeVar("Kind", bound=Event)

# The figures of one log step.
LOG = events.Log(
    step=10,
    total_steps=20,
    loss=2.5,
    lr=1e-3,
    grad_norm=0.5,
    unit="tok",
    memory_bytes=1024,
    world_size=2,
    step_ms=12.5,
    units_per_s=100.0,
    samples_per_s=10.0,
    mfu=0.4,
    eta_s=1.5,
    metrics={"accuracy": 0.75},
)


def changed(event: Kind, **fields: Any) -> Kind:
    """Return the event with other values, checked as its own were."""
    return event.model_validate({**dict(event), **fields})


def event_lines(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return every line, oldest first."""
    return list(read_lines(directory.store, EVENTS))
