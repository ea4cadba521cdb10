"""Files with which a run shows its workers' progress while a user watches.

The watching program writes a mark into the run directory again and again. While marks arrive, the coordinator writes
the progress of the workers. A run that no program watches writes nothing.
"""

import time
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from steadfast.storage import Store
from steadfast.storage.documents import read_json, write_json

WATCHED = "watched.json"
WORKERS = "workers.json"
_FRESH_S = 10.0  # age up to which the workers' progress describes the present


class Worker(BaseModel):
    """Progress of a worker, from its newest heartbeat."""

    model_config = ConfigDict(frozen=True)

    rank: int
    name: str
    node: str
    step: int  # last finished step
    phase: str
    phase_s: float  # seconds in the phase so far
    host: str | None = None
    pid: int | None = None
    own_ms: float | None = None  # time of a step that the rank spends by itself; None without a finished step


class _Workers(BaseModel):
    time_s: float
    attempt: int
    workers: tuple[Worker, ...]


def mark_watched(store: Store) -> None:
    """Write the mark that a user watches the run."""
    write_json(store, WATCHED, {})


def pop_mark(store: Store) -> bool:
    """Delete the mark, and return whether there was one."""
    if read_json(store, WATCHED) is None:
        return False
    store.delete(WATCHED)
    return True


def write_workers(store: Store, attempt: int, workers: Sequence[Worker]) -> None:
    """Write the progress of an attempt's workers."""
    document = _Workers(time_s=time.time(), attempt=attempt, workers=tuple(workers))
    write_json(store, WORKERS, document.model_dump())


def read_workers(store: Store, attempt: int) -> tuple[Worker, ...]:
    """Return the progress of an attempt's workers.

    Returns () if the file is missing, invalid, old or of another attempt.
    """
    try:
        found = _Workers.model_validate(read_json(store, WORKERS))
    except ValidationError:
        return ()
    if found.attempt != attempt or abs(time.time() - found.time_s) > _FRESH_S:
        return ()
    return found.workers
