"""Locate, read and write the files of a run directory."""

import json
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Self, TypeVar

from steadfast.config import BatchConfig, Config, decoded, dump_config, parse_config
from steadfast.errors import StorageError, UsageError
from steadfast.plan import Amendments, End
from steadfast.run.events import Event, ForwardsShrunk, Rollback, ShortStep, parse_event
from steadfast.run.owner import delete_claim, read_owner
from steadfast.run.watching import WATCHED, WORKERS
from steadfast.storage import Store, join, open_store
from steadfast.storage.documents import read_document, read_json, write_json
from steadfast.storage.jsonl import is_count, is_moment, last_lines, open_stream, read_lines, sync

STEPS = "steps.jsonl"  # sample ledger
METRICS = "metrics.jsonl"  # figures of log steps
EVENTS = "events.jsonl"
REPORT = "report.html"
PROFILE = "profile"  # folder of the profiler's traces
STACKS = "stacks"  # folder of the workers' stacks
_CONFIG = "config.yaml"
_ENVIRONMENT = "environment.json"
_SUMMARY = "summary.json"
_REQUESTS = "requests"  # folder with a file for each request of a user
_MICROBATCH = "microbatch.json"
_PROBE = ".writable"
_CURVES = "tensorboard"
_FILES = (
    _CONFIG,
    _SUMMARY,
    _MICROBATCH,
    EVENTS,
    STEPS,
    METRICS,
    REPORT,
    _ENVIRONMENT,
    WATCHED,
    WORKERS,
)
_FOLDERS = ("checkpoints", "faults", PROFILE, STACKS, _REQUESTS, _CURVES, "wandb", "mlflow")
_OF_RAY = (".validate_storage_marker", "checkpoint_manager_snapshot.json")  # files that Ray Train writes
_SHARED = Path("/mnt/shared")  # folder that all nodes of a cluster share
_LAST_LINE_BYTES = 16384  # more than most lines of the ledger

Kind = TypeVar("Kind", bound=Event)


def runs_root() -> Path:
    """Return the folder that relative paths of runs begin in."""
    return _SHARED if _SHARED.is_dir() else Path.cwd()


def place_of_data(path: str) -> str:
    """Return the location of a path or pattern of data.

    A path that exists in the working directory is used as it is. Otherwise the path is looked up where runs are stored.
    """
    # A path that leads nowhere is returned as it is. It may be a name on Hugging Face's hub, and if not, the message
    # about the missing data names what the user wrote.
    below = str(runs_root() / path)
    for place in (path, below):
        if Path(place).exists() or glob(place, recursive=True):
            return place
    return path


class EventWriter:
    """Writer of `events.jsonl`. A run has one writer at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stream = open_stream(store, EVENTS)

    def write(self, event: Event) -> None:
        """Write an event if its class sets `kept`; other events are only shown."""
        if event.kept:
            self._stream.write([event.stamped().to_line()])
        if isinstance(event, Rollback | ShortStep | ForwardsShrunk):
            sync(self._store, EVENTS)  # later steps depend on these

    def close(self) -> None:
        """Wait until all events are written, or until storage refuses another attempt."""
        self._stream.close()


@dataclass(frozen=True)
class ScaleRequest:
    """Request for other bounds of the number of workers."""

    name: str
    smallest: int
    largest: int


@dataclass(frozen=True)
class KillRequest:
    """Request to kill the worker of a rank."""

    name: str
    rank: int


Request = ScaleRequest | KillRequest


@dataclass(frozen=True)
class RunDirectory:
    """The directory `{run.storage}/{run.name}`.

    The object can be pickled, and is valid on every node with access to the storage.
    """

    store: Store

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls.at(join(config.run.storage, config.run.name))

    @classmethod
    def at(cls, location: str) -> Self:
        """Return the run directory at a path or URI.

        Raises UsageError if the URI's scheme is unknown.
        """
        if "://" not in location:
            location = str(runs_root() / location)
        try:
            return cls(open_store(location))
        except ValueError as error:
            raise UsageError(f"run.storage: {location}: {error}") from error

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def name(self) -> str:
        """Return the run's name, which is the last part of its location."""
        # Options of a bucket follow its path after a question mark.
        return self.uri.partition("?")[0].rstrip("/").rpartition("/")[2]

    def __truediv__(self, name: str) -> str:
        return join(self.uri, name)

    def check_writable(self) -> bool:
        """Check that the run directory can be written.

        Returns True if the directory was empty. Raises UsageError if writing fails.
        """
        # The test file would make any directory look used, so the directory is listed before the test.
        try:
            new = not self.store.list("")
            self.store.commit(_PROBE, b"")
            self.store.delete(_PROBE)
        except OSError as error:
            raise UsageError(
                f"run.storage: {self.uri} cannot be written: {error.strerror or error}. Choose another run.storage"
            ) from error
        return new

    def check_shared(self) -> None:
        """Check that this machine sees the command's files.

        Raises StorageError if the files are missing.
        """
        with suppress(OSError):  # storage that does not answer may still be shared
            if read_owner(self.store):
                return
            raise StorageError(
                f"{socket.gethostname()} does not see {self.uri}, the directory of the run. Mount one folder "
                f"on all nodes, at {_SHARED} for example, or give run.storage a bucket or a path that all of them share"
            )

    def open_events(self) -> EventWriter:
        return EventWriter(self.store)

    def record(self, event: Event) -> None:
        """Append one event. For several events `open_events` is faster."""
        writer = self.open_events()
        writer.write(event)
        writer.close()

    def all_events(self) -> Iterator[Event]:
        """Yield the kept events in the order of the file.

        Events that this release does not know are left out.
        """
        for line in read_lines(self.store, EVENTS):
            event = parse_event(line)
            if event is not None:
                yield event

    def events(self, kind: type[Kind]) -> list[Kind]:
        """Return the kept events of one kind."""
        return [event for event in self.all_events() if isinstance(event, kind)]

    def last_step_line(self) -> dict[str, Any]:
        """Return the last line of the ledger, {} without lines.

        Only the end of the file is read.
        """
        for line in reversed(last_lines(self.store, STEPS, _LAST_LINE_BYTES)):
            if is_count(line.get("step")) and is_moment(line.get("time_s", 0.0)):
                return line
        return {}

    def last_step(self) -> int:
        """Return the step of the ledger's last line, 0 without lines."""
        return int(self.last_step_line().get("step", 0))

    def amendments(self) -> Amendments:
        """Return the changes to the plan that follow from the events."""
        skipped: set[int] = set()
        # An extension that was interrupted has recorded the same end as the extension after it, so ends are a set.
        ends: set[End] = set()
        sizes: list[int] = []
        for event in self.all_events():
            match event:
                case Rollback(steps=steps):
                    skipped.update(steps)
                case ShortStep(step=step, position=position):
                    ends.add(End(step, position))
                case ForwardsShrunk(forward_size=size):
                    sizes.append(size)
        return Amendments(frozenset(skipped), tuple(sorted(ends)), min(sizes, default=None))

    def microbatch_size(self) -> int | None:
        """Return the microbatch size that the run has chosen.

        Returns None if no size is chosen yet. Raises StorageError if the size cannot be read.
        """
        # An unreadable file must raise. Otherwise another size would be chosen, and dropout would draw other numbers.
        place = self / _MICROBATCH
        try:
            match json.loads(read_document(self.store, _MICROBATCH)):
                case {"microbatch_size": int(size)} if size >= 1:
                    return size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{place} cannot be read: {error.strerror or error}") from error
        except ValueError:
            pass
        remedy = 'Write {"microbatch_size": N} there, or give batch.microbatch_size=N'
        raise StorageError(f"{place} does not contain the size that batch.microbatch_size=auto has chosen. {remedy}")

    def write_microbatch_size(self, size: int) -> None:
        """Record the run's microbatch size. Raises StorageError."""
        self._write(_MICROBATCH, {"microbatch_size": size})

    def batch(self, batch: BatchConfig) -> BatchConfig:
        """Return the section `batch` with the chosen microbatch size.

        If no size is chosen yet, the section is returned as it is.
        """
        if batch.microbatch_size != "auto":
            return batch
        size = self.microbatch_size()
        if size is None:
            return batch
        return batch.with_microbatches_of(size)

    def summary(self) -> dict[str, Any] | None:
        """Return the run's summary, None if it is missing or invalid."""
        found = read_json(self.store, _SUMMARY)
        # The folder may be the user's, and have a file of this name that no run has written.
        match found:
            case {"step": step, "metrics": dict(), "status": _} if is_count(step):
                return found
        return None

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Record that the run has ended. Raises StorageError."""
        for stream in (STEPS, EVENTS, METRICS):
            sync(self.store, stream)  # nothing repairs the lines of a finished run
        self._write(_SUMMARY, summary)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        try:
            write_json(self.store, name, value)
        except OSError as error:
            raise StorageError.cannot_write(self / name, error) from error

    def delete_summary(self) -> None:
        """Delete the summary, because the run continues."""
        self.store.delete(_SUMMARY)

    def curves(self) -> str | None:
        """Return the location of TensorBoard's curves, None without curves."""
        with suppress(OSError):
            if self.store.list(_CURVES):
                return self / _CURVES
        return None

    def holds_traces(self) -> bool:
        """Return whether the run has stored stacks or profiles."""
        return bool(self.store.list(STACKS) or self.store.list(PROFILE))

    def request_scale(self, smallest: int, largest: int) -> str:
        """Request other bounds of the number of workers, and return the request's name.

        The command that owns the run reads the request.
        """
        return self._request({"num_workers": [smallest, largest]})

    def request_kill(self, rank: int) -> str:
        """Request to kill the worker of a rank, and return the request's name.

        The command that owns the run reads the request.
        """
        return self._request({"kill": rank})

    def _request(self, request: dict[str, Any]) -> str:
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        write_json(self.store, f"{_REQUESTS}/{name}", request)
        return name

    def waits(self, request: str) -> bool:
        """Return whether no command has read a request yet."""
        return request in self.store.list(_REQUESTS)

    def withdraw(self, request: str) -> None:
        """Delete a request, which takes no effect any more unless it has been read."""
        self.store.delete(f"{_REQUESTS}/{request}")

    def pop_requests(self) -> list[Request]:
        """Return and delete the requests of users, oldest first."""
        found: list[Request] = []
        for name in self.store.list(_REQUESTS):
            if name.startswith("."):  # a request that is being written
                continue
            request = read_json(self.store, f"{_REQUESTS}/{name}")
            # An invalid request is deleted too, so that it is read only once.
            self.withdraw(name)
            match request:
                case {"num_workers": [int(smallest), int(largest)]} if 1 <= smallest <= largest:
                    found.append(ScaleRequest(name, smallest, largest))
                case {"kill": int(rank)} if rank >= 0:
                    found.append(KillRequest(name, rank))
        return found

    def stored_config(self) -> Config | None:
        """Return the configuration of the run's last start.

        Returns None for a run without one. Raises ConfigError if the file is invalid, and StorageError if the file is
        empty or cannot be read.
        """
        try:
            text = decoded(read_document(self.store, _CONFIG), self / _CONFIG)
        except FileNotFoundError:
            return None
        except OSError as error:
            # An error must raise. A bucket that does not answer would otherwise make the run look new, and the command
            # would overwrite the run.
            raise StorageError(f"{self / _CONFIG} cannot be read: {error.strerror or error}") from error
        if not text.strip():  # an empty file would mean a run of defaults
            raise StorageError(f"{self / _CONFIG} is empty. Restore the file, or choose another run.name")
        # An earlier release may have written the file, with names of keys that a new configuration may no longer use.
        return parse_config(text, self / _CONFIG, former_names=True)

    def write_config(self, config: Config) -> None:
        self.store.commit(_CONFIG, dump_config(config).encode())

    def write_environment(self, found: dict[str, Any]) -> None:
        write_json(self.store, _ENVIRONMENT, found)

    def clear(self) -> None:
        """Delete the files of a run, except its owner's claim."""
        # Files are deleted by name, because the folder may also hold files of the user.
        for name in (*_FILES, *_FOLDERS):
            self.store.delete(name)

    def delete(self) -> list[str]:
        """Delete all files of the run, and its folder.

        The run must be claimed by this command. Files that no run writes are kept, and so is the folder with them.
        Returns their names. Raises OSError.
        """
        self.clear()
        for name in (*_OF_RAY, _PROBE):
            self.store.delete(name)
        # A command that was killed during a commit has left a temporary file.
        temporary = tuple(f".{name}." for name in (*_FILES, "owner"))
        for name in self.store.list(""):
            if name.startswith(temporary):
                self.store.delete(name)
        delete_claim(self.store)
        kept = self.store.list("")
        if not kept:
            self.store.delete("")
        return kept


@contextmanager
def reading(directory: RunDirectory) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the file."""
    try:
        yield
    except BrokenPipeError:  # the command line ends quietly after the reader of its output has ended
        raise
    except OSError as error:
        place = error.filename or directory.uri
        raise StorageError(f"{place} cannot be read: {error.strerror or error}") from error


def find_run(name: str, storage: str = "runs") -> RunDirectory:
    """Return the existing run with a name, path or URI.

    A name is looked up below `storage`, which is a path or URI. Raises UsageError if there is no such run.
    """
    places = [name]
    if "://" not in name:
        below = str(runs_root() / storage / name)
        if "://" in storage:
            below = f"{storage}/{name}"
        places = [str(Path.cwd() / name), str(runs_root() / name), below]
    for place in places:
        directory = RunDirectory.at(place)
        # Every command writes owner.json first, so a directory without it is no run.
        try:
            if read_owner(directory.store):
                return directory
        except OSError as error:
            raise UsageError(f"{place} cannot be read: {error.strerror or error}") from error
    tried = " or ".join(dict.fromkeys((places[0], places[-1])))
    raise UsageError(f"no run at {tried}; of a run with another run.storage give the path, or --storage FOLDER")
