"""The run directory: what lies where, and what giving the same command again means."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.checkpoint.catalog import Catalog
from app.config import Change, Config, diff, dump_config, parse_config
from app.errors import RunConflict, StorageError, UsageError
from app.owner import read_owner
from app.storage import Store, join, open_store
from app.storage.documents import read_json, write_json
from app.stream import Stream, last_lines, open_stream, read_lines
from app.telemetry.environment import environment
from app.telemetry.narrate import already_finished

STEPS = "steps.jsonl"  # the sample ledger
_PROBE, _CONFIG, _SUMMARY, _SCALE, _EVENTS = ".writable", "config.yaml", "summary.json", "scale.json", "events.jsonl"
_ENVIRONMENT, _FOLDERS = "environment.json", ("checkpoints", "faults", "stacks", "tensorboard")
_SHARED = Path("/mnt/shared")  # where the nodes of a cluster have the same folder


def base() -> Path:
    """What a relative path of a run is relative to."""
    return _SHARED if _SHARED.is_dir() else Path.cwd()


def stamped(event: dict[str, Any]) -> dict[str, Any]:
    return {"time_s": round(time.time(), 4), **event}


@dataclass(frozen=True)
class RunDirectory:
    """`{run.storage}/{run.name}`; a path is relative to the nodes' shared folder where there is one. Pickles, and means
    the same on every node that sees the storage."""

    store: Store

    @classmethod
    def of(cls, config: Config) -> RunDirectory:
        return cls.at(join(config.run.storage, config.run.name))

    @classmethod
    def at(cls, location: str) -> RunDirectory:
        try:
            return cls(open_store(location if "://" in location else str(base() / location)))
        except ValueError as error:
            raise UsageError(f"run.storage: {location}: {error}") from error

    @property
    def uri(self) -> str:
        return self.store.uri

    def __truediv__(self, name: str) -> str:
        return join(self.uri, name)

    def create(self) -> bool:
        """Whether nothing is there yet.

        Raises:
            UsageError: nothing can be written there.
        """
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
        """
        Raises:
            StorageError: this machine does not see what the command has put there.
        """
        with suppress(OSError):  # storage that does not answer may be shared all the same
            if read_owner(self.store):
                return
            raise StorageError(
                f"{socket.gethostname()} does not see {self.uri}, where the command keeps the run. Mount one folder "
                f"on all nodes, at {_SHARED} for example, or give run.storage a bucket or a path that all of them share"
            )

    def open_events(self) -> Stream:
        return open_stream(self.store, _EVENTS)

    def record(self, event: dict[str, Any]) -> None:
        """Appends one event; whoever has more to tell opens the stream."""
        stream = self.open_events()
        stream.write([stamped(event)])
        stream.close()

    def read_events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.store, _EVENTS))

    def last_step_line(self) -> dict[str, Any] | None:
        """The last line of the ledger, without reading what comes before it."""
        return next(reversed(last_lines(self.store, STEPS, 16384)), None)

    def skipped_steps(self) -> frozenset[int]:
        """What the rollbacks so far leave out."""
        rollbacks = [event["steps"] for event in self.read_events() if event["event"] == "rollback"]
        return frozenset(step for steps in rollbacks for step in steps)

    def summary(self) -> dict[str, Any] | None:
        return read_json(self.store, _SUMMARY)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.store, _SUMMARY, summary)

    def wish_for_scale(self, smallest: int, largest: int) -> None:
        """From another process; the one that runs the run takes it up."""
        write_json(self.store, _SCALE, {"num_workers": [smallest, largest]})

    def take_scale(self) -> tuple[int, int] | None:
        """The newest wish, once."""
        wish = read_json(self.store, _SCALE)
        if wish is None:
            return None
        self.store.delete(_SCALE)
        return tuple(wish["num_workers"])

    def has_checkpoint(self) -> bool:
        catalog = Catalog(self.store)
        return bool(catalog.quarantined()) or catalog.newest() is not None

    def discard_if_unused(self) -> None:
        """Leaves nothing of a command that failed before its first step, in a folder that was new."""
        if not self.has_checkpoint() and self.last_step_line() is None:
            self.store.delete("")

    def stored_config(self) -> Config | None:
        """
        Raises:
            StorageError: storage does not say whether there is one.
        """
        try:
            return parse_config(self.store.read(_CONFIG).decode())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{self / _CONFIG} cannot be read: {error.strerror or error}") from error


def find_run(name: str) -> RunDirectory:
    """An existing one: by its path or URI, or by its name below runs/ where runs are kept.

    Raises:
        UsageError: there is none, or storage does not say.
    """
    places = [name] if "://" in name else [str(folder / name) for folder in (Path.cwd(), base(), base() / "runs")]
    for place in places:
        directory = RunDirectory.at(place)
        try:
            if read_owner(directory.store):
                return directory
        except OSError as error:
            raise UsageError(f"{place} cannot be read: {error.strerror or error}") from error
    raise UsageError(f"no run at {' or '.join(dict.fromkeys((places[0], places[-1])))}")


def begin(
    config: Config, directory: RunDirectory, launcher: str, started_s: float, say: Callable[[str], object]
) -> bool:
    """Decides between starting, resuming and having finished, and writes down what is to run.

    Returns:
        Whether there is anything left to do; if not, it has been said.

    Raises:
        RunConflict: the directory holds another run, or `run.resume` forbids what would have to be done.
        StorageError: storage does not say what it holds.
    """
    stored, exists = directory.stored_config(), directory.has_checkpoint()
    if config.run.resume == "must" and not exists:
        raise RunConflict(f"run.resume=must, but {directory.uri} holds no checkpoint to resume from")
    if config.run.resume == "never" and exists:
        raise RunConflict(
            f"run.resume=never, but {directory.uri} holds checkpoints. Choose another run.name, or remove it"
        )
    changes = diff(stored, config) if stored else []
    refused = [change for change in changes if change.identity]
    if refused and exists:
        raise RunConflict(
            f"{directory.uri} holds a run of another configuration:\n{_said(refused)}\n"
            "Give the former values to resume it, or choose another run.name"
        )
    if refused:  # nothing to resume: what is left of the former configuration would only mislead
        _clear(directory)
    summary = directory.summary()
    if summary and summary["status"] == "finished" and not _extends(config, stored, summary):
        say(already_finished(config, directory.uri, summary))
        return False
    directory.store.delete(_SUMMARY)
    directory.take_scale()  # it was meant for a run that has ended
    directory.store.commit(_CONFIG, dump_config(config).encode())
    for change in changes:
        if exists and not change.identity and not change.free:
            say(f"changed {change.key}: {change.old} -> {change.new}")
    directory.record({"event": "run_started", "time_s": started_s, "launcher": launcher})
    write_json(directory.store, _ENVIRONMENT, environment())
    return True


def _extends(config: Config, stored: Config | None, summary: dict[str, Any]) -> bool:
    if config.run.steps is not None:
        return config.run.steps > int(summary["step"])
    return stored is None or stored.run.epochs is None or (config.run.epochs or 0) > stored.run.epochs


def _said(changes: list[Change]) -> str:
    return "\n".join(f"  {change.key}: {change.old} -> {change.new}" for change in changes)


def _clear(directory: RunDirectory) -> None:
    for name in (_CONFIG, _SUMMARY, _SCALE, _EVENTS, STEPS, _ENVIRONMENT, *_FOLDERS):
        directory.store.delete(name)
