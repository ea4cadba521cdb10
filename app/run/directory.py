"""The run directory: what lies where."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Self, TypeVar

from app.config import BatchConfig, Config, decoded, dump_config, parse_config
from app.errors import StorageError, UsageError
from app.plan import Amendments, End
from app.run.events import Event, ForwardsShrunk, Rollback, ShortStep, parse_event
from app.run.owner import read_owner
from app.storage import Store, join, open_store
from app.storage.documents import read_document, read_json, write_json
from app.storage.jsonl import is_count, is_moment, last_lines, open_stream, read_lines

STEPS = "steps.jsonl"  # the sample ledger
METRICS = "metrics.jsonl"  # the figures of log steps
EVENTS = "events.jsonl"
REPORT = "report.html"
PROFILE = "profile"  # a folder
STACKS = "stacks"  # a folder
_CONFIG = "config.yaml"
_ENVIRONMENT = "environment.json"
_SUMMARY = "summary.json"
_SCALE = "scale.json"
_MICROBATCH = "microbatch.json"
_PROBE = ".writable"
_CURVES = "tensorboard"
_FOLDERS = ("checkpoints", "faults", PROFILE, STACKS, _CURVES, "wandb")
_SHARED = Path("/mnt/shared")  # where the nodes of a cluster have the same folder
# Longer than any line of the ledger, whose shares grow with the world; a line that is cut off at its front is no line.
_LAST_LINE_BYTES = 16384

Kind = TypeVar("Kind", bound=Event)


def base() -> Path:
    """Return what a relative path of a run is relative to."""
    return _SHARED if _SHARED.is_dir() else Path.cwd()


def place_of_data(path: str) -> str:
    """Return where a path or pattern of data leads: in the working directory if anything is there, else as of a run."""
    below = str(base() / path)
    for place in (path, below):
        if Path(place).exists() or glob(place, recursive=True):
            return place
    return path


class EventWriter:
    """Appends events to `events.jsonl`. A run has one at a time."""

    def __init__(self, store: Store) -> None:
        self._stream = open_stream(store, EVENTS)

    def write(self, event: Event) -> None:
        """Write an event down, unless it is one that is only shown."""
        if event.kept:
            self._stream.write([event.stamped().to_line()])

    def close(self) -> None:
        """Return once all is on storage, or storage has refused it once more."""
        self._stream.close()


@dataclass(frozen=True)
class RunDirectory:
    """The directory `{run.storage}/{run.name}`. It pickles, and means the same on every node that sees the storage."""

    store: Store

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls.at(join(config.run.storage, config.run.name))

    @classmethod
    def at(cls, location: str) -> Self:
        """Return the directory at a path or URI. Raises UsageError for a URI of a kind that storage does not know."""
        if "://" not in location:
            location = str(base() / location)
        try:
            return cls(open_store(location))
        except ValueError as error:
            raise UsageError(f"run.storage: {location}: {error}") from error

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def name(self) -> str:
        """The run's name, with which its location ends."""
        return self.uri.partition("?")[0].rstrip("/").rpartition("/")[2]

    def __truediv__(self, name: str) -> str:
        return join(self.uri, name)

    def check_writable(self) -> bool:
        """Check that the run directory can be written. Return True if it was empty. Raises UsageError."""
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
        """Check that this machine sees what the command has put there. Raises StorageError if not."""
        with suppress(OSError):  # storage that does not answer may be shared all the same
            if read_owner(self.store):
                return
            raise StorageError(
                f"{socket.gethostname()} does not see {self.uri}, where the command keeps the run. Mount one folder "
                f"on all nodes, at {_SHARED} for example, or give run.storage a bucket or a path that all of them share"
            )

    def open_events(self) -> EventWriter:
        return EventWriter(self.store)

    def record(self, event: Event) -> None:
        """Append one event; whoever has more to tell opens the writer."""
        writer = self.open_events()
        writer.write(event)
        writer.close()

    def all_events(self) -> Iterator[Event]:
        """Yield the kept events that this release knows, in the order in which they were written."""
        for line in read_lines(self.store, EVENTS):
            event = parse_event(line)
            if event is not None:
                yield event

    def events(self, kind: type[Kind]) -> list[Kind]:
        """Return the kept events of one kind."""
        return [event for event in self.all_events() if isinstance(event, kind)]

    def last_step_line(self) -> dict[str, Any]:
        """Return the last line of the ledger, {} if there is none; what comes before is not read."""
        for line in reversed(last_lines(self.store, STEPS, _LAST_LINE_BYTES)):
            if is_count(line.get("step")) and is_moment(line.get("time_s", 0.0)):
                return line
        return {}

    def amendments(self) -> Amendments:
        """Return what the events so far have changed about the plan."""
        skipped: set[int] = set()
        # An extension that was broken off has told of the same end as the one after it.
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
        """Return the size that was chosen for all microbatches of the run, None while it is not chosen yet.

        Raises StorageError if that cannot be known.
        """
        # Not None then: another size would be chosen, and the run would go on with other randomness.
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
        remedy = 'Put {"microbatch_size": N} there, or give batch.microbatch_size=N'
        raise StorageError(f"{place} does not say what batch.microbatch_size=auto has chosen for this run. {remedy}")

    def write_microbatch_size(self, size: int) -> None:
        """Have the run remember the size of its microbatches. Raises StorageError."""
        try:
            write_json(self.store, _MICROBATCH, {"microbatch_size": size})
        except OSError as error:
            raise StorageError(f"{self / _MICROBATCH} cannot be written: {error.strerror or error}") from error

    def batch(self, config: Config) -> BatchConfig:
        """Return the section `batch` as it holds for the run: auto is the number that was chosen, where one was."""
        size = self.microbatch_size() if config.batch.microbatch_size == "auto" else None
        return config.batch if size is None else config.batch.with_microbatches_of(size)

    def summary(self) -> dict[str, Any] | None:
        """Return what `write_summary` has written, None if there is none, or something else."""
        found = read_json(self.store, _SUMMARY) or {}
        is_ours = is_count(found.get("step")) and isinstance(found.get("metrics"), dict) and "status" in found
        return found if is_ours else None

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.store, _SUMMARY, summary)

    def delete_summary(self) -> None:
        """Take back that the run has ended: it goes on."""
        self.store.delete(_SUMMARY)

    def curves(self) -> str | None:
        """Return where TensorBoard finds the run's curves, None if it has none."""
        with suppress(OSError):
            if self.store.list(_CURVES):
                return self / _CURVES
        return None

    def holds_traces(self) -> bool:
        """Return whether stacks of workers or profiles are stored here."""
        return bool(self.store.list(STACKS) or self.store.list(PROFILE))

    def request_scale(self, smallest: int, largest: int) -> None:
        """Leave a request for other bounds; the process that runs the run takes it up."""
        write_json(self.store, _SCALE, {"num_workers": [smallest, largest]})

    def pop_scale_request(self) -> tuple[int, int] | None:
        """Return the newest request for other bounds, once."""
        request = read_json(self.store, _SCALE)
        if request is None:
            return None
        self.store.delete(_SCALE)
        match request:
            case {"num_workers": [int(smallest), int(largest)]} if 1 <= smallest <= largest:
                return smallest, largest
        return None

    def stored_config(self) -> Config | None:
        """Return the configuration that the run was last started with; None if there is none.

        Raises ConfigError if it has been changed to what is none, and StorageError if it cannot be read, or is empty.
        """
        try:
            text = decoded(read_document(self.store, _CONFIG), self / _CONFIG)
        except FileNotFoundError:
            return None
        except OSError as error:
            # Not None: a bucket that does not answer would make a run look new, and the command would start it anew.
            raise StorageError(f"{self / _CONFIG} cannot be read: {error.strerror or error}") from error
        if not text.strip():  # which would be a run of defaults
            raise StorageError(f"{self / _CONFIG} is empty. Bring it back, or choose another run.name")
        return parse_config(text, self / _CONFIG)

    def write_config(self, config: Config) -> None:
        self.store.commit(_CONFIG, dump_config(config).encode())

    def write_environment(self, found: dict[str, Any]) -> None:
        write_json(self.store, _ENVIRONMENT, found)

    def clear(self) -> None:
        """Delete all that a run leaves, except the claim of the command that runs it."""
        # By name: the folder itself may hold what the user put there.
        for name in (_CONFIG, _SUMMARY, _SCALE, _MICROBATCH, EVENTS, STEPS, METRICS, REPORT, _ENVIRONMENT, *_FOLDERS):
            self.store.delete(name)


@contextmanager
def reading(directory: RunDirectory) -> Iterator[None]:
    """Turn an OSError of reading a run directory into a StorageError that names the file."""
    try:
        yield
    except BrokenPipeError:  # from printing: the command line ends quietly when the reader of its output has left
        raise
    except OSError as error:
        place = error.filename or directory.uri
        raise StorageError(f"{place} cannot be read: {error.strerror or error}") from error


def find_run(name: str, storage: str = "runs") -> RunDirectory:
    """Return an existing run: by its path or URI, or by its name below `storage`, a path or URI. Raises UsageError."""
    places = [name]
    if "://" not in name:
        below = f"{storage}/{name}" if "://" in storage else str(base() / storage / name)
        places = [str(Path.cwd() / name), str(base() / name), below]
    for place in places:
        directory = RunDirectory.at(place)
        try:
            if read_owner(directory.store):
                return directory
        except OSError as error:
            raise UsageError(f"{place} cannot be read: {error.strerror or error}") from error
    raise UsageError(f"no run at {' or '.join(dict.fromkeys((places[0], places[-1])))}")
