"""Events as scripts read them: the lines of `events.jsonl`."""

from __future__ import annotations

from typing import Any, TypeVar

from steadfast.run.directory import EVENTS, RunDirectory
from steadfast.run.events import Event
from steadfast.storage.jsonl import read_lines

Kind = TypeVar("Kind", bound=Event)


def changed(event: Kind, **fields: Any) -> Kind:
    """Return the event with other values, checked as its own were."""
    return event.model_validate({**dict(event), **fields})


def event_lines(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return every line, oldest first."""
    return list(read_lines(directory.store, EVENTS))
