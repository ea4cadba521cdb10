"""The run directory: what lies where, and what giving the same command again means."""

from __future__ import annotations

import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import Change, Config, diff, dump_config, parse_config
from app.errors import RunConflict, StorageError, UsageError
from app.files import append_line, last_line, read_json, read_lines, write_json, write_text
from app.storage import LocalStore, Store

_SHARED = Path("/mnt/shared")  # where the nodes of a cluster have the same folder


def base() -> Path:
    """What a relative path of a run is relative to."""
    return _SHARED if _SHARED.is_dir() else Path.cwd()


def stamped(event: dict[str, Any]) -> dict[str, Any]:
    return {"time_s": round(time.time(), 4), **event}


@dataclass(frozen=True)
class RunDirectory:
    """`{run.storage}/{run.name}`, relative to the nodes' shared folder where there is one. Pickles, and means the same
    on every node that sees the storage."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunDirectory:
        if "://" in config.run.storage:
            raise UsageError(f"run.storage: {config.run.storage}: only paths are supported so far")
        return cls(base() / config.run.storage / config.run.name)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def store(self) -> Store:
        return LocalStore(self.path)

    @property
    def owner(self) -> Path:
        return self / "owner.json"

    @property
    def ledger(self) -> Path:
        return self / "steps.jsonl"

    @property
    def events(self) -> Path:
        return self / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self / "checkpoints"

    def create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UsageError(
                f"run.storage: {self.path} cannot be written: {error.strerror}. Choose another run.storage"
            ) from error

    def check_shared(self) -> None:
        """
        Raises:
            StorageError: this machine does not see what the command has put there.
        """
        if not self.owner.exists():
            raise StorageError(
                f"{socket.gethostname()} does not see {self.path}, where the command keeps the run. Mount one folder "
                f"on all nodes, at {_SHARED} for example, or give run.storage a path that all of them share"
            )

    def record(self, event: dict[str, Any]) -> dict[str, Any]:
        """Appends to events.jsonl and returns the event as written."""
        event = stamped(event)
        append_line(self.events, event)
        return event

    def read_events(self) -> list[dict[str, Any]]:
        return list(read_lines(self.events))

    def skipped_steps(self) -> frozenset[int]:
        """What the rollbacks so far leave out."""
        rollbacks = [event["steps"] for event in self.read_events() if event["event"] == "rollback"]
        return frozenset(step for steps in rollbacks for step in steps)

    def write_environment(self, environment: dict[str, Any]) -> None:
        write_json(self / "environment.json", environment)

    def summary(self) -> dict[str, Any] | None:
        return read_json(self / "summary.json")

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self / "summary.json", summary)

    def wish_for_scale(self, smallest: int, largest: int) -> None:
        """From another process; the one that runs the run takes it up."""
        write_json(self / "scale.json", {"num_workers": [smallest, largest]})

    def take_scale(self) -> tuple[int, int] | None:
        """The newest wish, once."""
        wish = read_json(self / "scale.json")
        if wish is None:
            return None
        (self / "scale.json").unlink()
        return tuple(wish["num_workers"])

    def has_checkpoint(self) -> bool:
        return any(self.checkpoints.glob("step-*/manifest.json"))

    def discard_if_unused(self) -> None:
        """Leaves nothing of a command that failed before its first step."""
        if not self.has_checkpoint() and last_line(self.ledger) is None:
            shutil.rmtree(self.path, ignore_errors=True)

    def stored_config(self) -> Config | None:
        try:
            return parse_config((self / "config.yaml").read_text())
        except OSError:
            return None


def find_run(name: str) -> RunDirectory:
    """An existing one: by its path, or by its name below runs/ where runs are kept.

    Raises:
        UsageError: there is none.
    """
    places = [Path.cwd() / name, base() / name, base() / "runs" / name]
    found = next((path for path in places if (path / "owner.json").exists()), None)
    if found is None:
        raise UsageError(f"no run at {places[0]} or {places[-1]}")
    return RunDirectory(found)


@dataclass(frozen=True)
class Intent:
    """What a command means for its run directory: nothing to do, or train, with what is worth saying first."""

    finished: dict[str, Any] | None = None  # the summary of a run that has nothing left to do
    notes: tuple[str, ...] = ()


def prepare(config: Config, directory: RunDirectory) -> Intent:
    """Decides between starting, resuming and having finished, and writes the config down.

    Raises:
        RunConflict: the directory holds another run, or `run.resume` forbids what would have to be done.
    """
    stored, exists = directory.stored_config(), directory.has_checkpoint()
    if config.run.resume == "must" and not exists:
        raise RunConflict(f"run.resume=must, but {directory.path} holds no checkpoint to resume from")
    if config.run.resume == "never" and exists:
        raise RunConflict(
            f"run.resume=never, but {directory.path} holds checkpoints. Choose another run.name, or remove it"
        )
    changes = diff(stored, config) if stored else []
    refused = [change for change in changes if change.identity]
    if refused and exists:
        raise RunConflict(
            f"{directory.path} holds a run of another configuration:\n{_said(refused)}\n"
            "Give the former values to resume it, or choose another run.name"
        )
    if refused:  # nothing to resume: what is left of the former configuration would only mislead
        _clear(directory)
    summary = directory.summary()
    if summary and summary["status"] == "finished" and not _extends(config, stored, summary):
        return Intent(finished=summary)
    (directory / "summary.json").unlink(missing_ok=True)
    directory.take_scale()  # it was meant for a run that has ended
    write_text(directory / "config.yaml", dump_config(config))
    told = [change for change in changes if exists and not change.identity and not change.free]
    return Intent(notes=tuple(f"changed {change.key}: {change.old} -> {change.new}" for change in told))


def _extends(config: Config, stored: Config | None, summary: dict[str, Any]) -> bool:
    if config.run.steps is not None:
        return config.run.steps > int(summary["step"])
    return stored is None or stored.run.epochs is None or (config.run.epochs or 0) > stored.run.epochs


def _said(changes: list[Change]) -> str:
    return "\n".join(f"  {change.key}: {change.old} -> {change.new}" for change in changes)


def _clear(directory: RunDirectory) -> None:
    for path in directory.path.iterdir():
        if path != directory.owner:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
