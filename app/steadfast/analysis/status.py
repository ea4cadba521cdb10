"""Status of a run, read from its directory on any machine."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from steadfast.errors import StorageError
from steadfast.run.directory import METRICS, RunDirectory, reading
from steadfast.run.events import (
    AttemptEnded,
    AttemptStarted,
    Checkpoint,
    Event,
    Failure,
    Finished,
    Hang,
    HangOver,
    Log,
    RankTimes,
    RunStarted,
    Snapshot,
    Validation,
    Waiting,
    parse_event,
)
from steadfast.run.owner import Owner, read_owner
from steadfast.run.watching import Worker, mark_watched, read_workers
from steadfast.storage.jsonl import last_lines
from steadfast.telemetry.goodput import goodput, read_totals
from steadfast.telemetry.interruptions import Interruption, read_interruptions

_SILENT_S = 20.0  # length of the owner's lease
# The wait between two readings of the ledger, as a multiple of the time that a reading takes.
_GOODPUT_EVERY = 30
_NUM_LATEST = 8
_MARK_S = 3.0  # time between two marks that a user watches
_ALIVE = ("running", "starting", "waiting for workers")
_SHOWN_ABOVE = (Snapshot, Finished, RankTimes)  # events that other parts of the status show


@dataclass(frozen=True)
class Node:
    """Machine with its ranks of the newest attempt.

    The other fields have one entry for each of these ranks, and are () if unknown.
    """

    node: str
    ranks: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    own_ms: tuple[float, ...] = ()  # time of a step that the rank spends by itself
    last: tuple[float, ...] = ()  # share of the checks in which other ranks waited longest for the rank, 0 to 1


@dataclass(frozen=True)
class Status:
    """Status of a run at one moment. Unknown values are None."""

    uri: str
    state: str  # "running", "starting", "waiting for workers", "finished", "stopped", "failed", "killed", "silent"
    host: str | None  # host of the command, or of the last command
    pid: int | None
    heard_s: float | None  # seconds since the command renewed its claim, by this machine's clock
    launcher: str | None  # "ray" or "torchrun", of the last command
    attempt: int
    step: int
    step_age_s: float | None
    nodes: tuple[Node, ...]  # () if unknown
    workers: tuple[Worker, ...]  # by rank; () unless the run is on Ray and a user watches the run
    log: Log | None  # the newest figures
    metrics: dict[str, float] | None  # of the newest validation
    checkpoint: Checkpoint | None
    interruptions: tuple[Interruption, ...]
    latest: tuple[Event, ...]
    goodput: dict[str, float] | None

    @property
    def takes_requests(self) -> bool:
        """Return whether a coordinator reads requests of users.

        Under torchrun there is no coordinator.
        """
        return self.state in _ALIVE and self.launcher == "ray"

    @property
    def stuck(self) -> str:
        """Return the ranks that seem to be stuck now and their phase, "" if none are."""
        if self.state != "running":
            return ""
        for event in reversed(self.latest):
            match event:
                case Hang():
                    return event.what
                case HangOver() | Failure() | AttemptEnded() | AttemptStarted():
                    return ""
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the status as a document for JSON."""
        # `asdict` would not convert the events, which are no dataclasses.
        found: dict[str, Any] = dict(vars(self))
        for name in ("log", "checkpoint"):
            if found[name] is not None:
                found[name] = found[name].to_line()
        found["nodes"] = list(map(vars, self.nodes))
        found["workers"] = [worker.model_dump() for worker in self.workers]
        found["interruptions"] = list(map(vars, self.interruptions))
        found["latest"] = [event.to_line() for event in self.latest]
        return found


class StatusReader:
    """Reads the status of one run repeatedly.

    Args:
        watching: request the progress of the workers from a run that is not over.
    """

    def __init__(self, directory: RunDirectory, watching: bool = False) -> None:
        self.directory = directory
        self.events: list[Event] = []  # of the last reading
        self._watching = watching
        self._mark_again_s = 0.0
        self._goodput: dict[str, float] | None = None
        self._read_again_s = 0.0

    def read(self, brief: bool = False) -> Status:
        """Return the current status of the run.

        Args:
            brief: leave out the goodput, because a long ledger takes long to read.

        Raises:
            OSError: storage cannot be read.
        """
        events = self.events = list(self.directory.all_events())
        owner = read_owner(self.directory.store)
        host = pid = heard_s = step_age_s = None
        attempt = 0
        if owner is not None:
            host, pid, attempt = owner.host, owner.pid, owner.attempt
            # A released claim has no time of renewal.
            if owner.renewed:
                heard_s = owner.age_s
        last_line = self.directory.last_step_line()
        if "time_s" in last_line:
            step_age_s = time.time() - last_line["time_s"]
        figures = None
        if not brief:
            figures = self._read_goodput()
        launcher = None
        if started := _last(events, RunStarted):
            launcher = started.launcher
        status = Status(
            uri=self.directory.uri,
            state=state_of(events, owner, self.directory.summary()),
            host=host,
            pid=pid,
            heard_s=heard_s,
            launcher=launcher,
            attempt=attempt,
            step=int(last_line.get("step", 0)),
            step_age_s=step_age_s,
            nodes=_nodes(events),
            workers=read_workers(self.directory.store, attempt),
            log=_last_log(self.directory),
            metrics=_last_metrics(events),
            checkpoint=_last(events, Checkpoint),
            interruptions=tuple(read_interruptions(events)),
            latest=tuple(event for event in events if not isinstance(event, _SHOWN_ABOVE))[-_NUM_LATEST:],
            goodput=figures,
        )
        if self._watching and status.takes_requests:
            self._mark_watched()
        return status

    def _mark_watched(self) -> None:
        if time.monotonic() >= self._mark_again_s:
            self._mark_again_s = time.monotonic() + _MARK_S
            with suppress(OSError):  # a user who may only read the run directory sees no progress of workers
                mark_watched(self.directory.store)

    def _read_goodput(self) -> dict[str, float]:
        # A long ledger takes a minute to read, so readings are limited to a thirtieth of the time.
        if self._goodput is None or time.monotonic() >= self._read_again_s:
            began_s = time.monotonic()
            self._goodput = goodput(read_totals(self.directory))
            self._read_again_s = time.monotonic() + _GOODPUT_EVERY * (time.monotonic() - began_s)
        return self._goodput


def read_all(place: RunDirectory) -> tuple[list[Status], dict[str, str]]:
    """Read the runs directly below a folder.

    Returns the status of each run, and the errors of unreadable runs by URI.

    Raises:
        StorageError: the folder cannot be read.
    """
    statuses: list[Status] = []
    unreadable: dict[str, str] = {}
    with reading(place):
        names = place.store.list("")
    for name in names:
        directory = RunDirectory.at(place / name)
        # An unreadable run, such as a damaged or private one of another user, must not hide the other runs.
        try:
            with reading(directory):
                if read_owner(directory.store):  # a folder without an owner is no run
                    statuses.append(StatusReader(directory).read(brief=True))
        except StorageError as error:
            unreadable[directory.uri] = str(error)
    return statuses, unreadable


def state_of(events: Sequence[Event], owner: Owner | None, summary: dict[str, Any] | None) -> str:
    """Return the state of a run from its events, owner and summary."""
    # The summary comes first, because a command that ends a run also releases its claim.
    if summary is not None:
        return str(summary["status"])
    if owner is None or owner.gone:
        # A failed command records a fatal failure. A command without that record was killed.
        for event in _of_last_command(events):
            if isinstance(event, Failure) and event.fatal:
                return "failed"
        return "killed"
    # This host cannot see a process on another host, but only the renewals of its claim.
    if owner.age_s > _SILENT_S:
        return "silent"
    for event in reversed(events):
        match event:
            case AttemptStarted():
                return "running"
            case Waiting():
                return "waiting for workers"
            case AttemptEnded() | RunStarted():
                return "starting"
    return "starting"


def _of_last_command(events: Sequence[Event]) -> Sequence[Event]:
    # A later command may have resumed a run whose former command failed.
    for index in reversed(range(len(events))):
        if events[index].name == "run_started":
            return events[index:]
    return events


def _last(events: Sequence[Event], kind: type) -> Any:
    for event in reversed(events):
        if isinstance(event, kind):
            return event
    return None


def _nodes(events: Sequence[Event]) -> tuple[Node, ...]:
    started: AttemptStarted | None = _last(events, AttemptStarted)
    if started is None or started.nodes is None:
        return ()
    times: RankTimes | None = _last(events, RankTimes)
    known = started.gpus or ()
    nodes = []
    for name, ranks in started.nodes.items():
        node = Node(name, ranks, tuple(known[rank] for rank in ranks if rank < len(known)))
        # Times of an earlier attempt are by other ranks.
        if times is not None and times.attempt == started.attempt and max(ranks, default=0) < len(times.own_ms):
            num_looks = sum(times.last) or 1
            own_ms = tuple(times.own_ms[rank] for rank in ranks)
            node = replace(node, own_ms=own_ms, last=tuple(times.last[rank] / num_looks for rank in ranks))
        nodes.append(node)
    return tuple(nodes)


def _last_metrics(events: Sequence[Event]) -> dict[str, float] | None:
    for event in reversed(events):
        if isinstance(event, Validation):
            return dict(event.metrics)
        if isinstance(event, Finished):
            return dict(event.summary.get("metrics") or {}) or None
    return None


def _last_log(directory: RunDirectory) -> Log | None:
    for line in reversed(last_lines(directory.store, METRICS)):
        event = parse_event(line)
        if isinstance(event, Log):
            return event
    return None
