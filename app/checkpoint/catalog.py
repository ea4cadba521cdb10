"""The checkpoints of a run as they lie on storage: found, verified, quarantined, committed, retired."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from app.checkpoint.manifest import FileDigest, Manifest, parse_manifest
from app.checkpoint.retention import kept
from app.config import CheckpointConfig
from app.errors import StorageError
from app.storage import Bytes, Store
from app.storage.documents import read_json

_FOLDER = "checkpoints"
_MANIFEST = "manifest.json"
_MARK = ".quarantined.json"
_READ_BYTES = 2**24


class Damaged(Exception):
    """A checkpoint is not what was written. The message names the file."""


@dataclass(frozen=True)
class Catalog:
    """A folder a step, `checkpoints/step-00001200/`. One without a manifest is not a checkpoint (yet), and one with a
    marker beside it is not trusted any more."""

    store: Store

    def steps(self) -> list[int]:
        """Of all that have not been found to be damaged, newest first; some may turn out to be."""
        names = self.store.list(_FOLDER)
        return sorted((_step(name) for name in names if _is_step(name) and name + _MARK not in names), reverse=True)

    def quarantined(self) -> dict[int, str]:
        """Why, by step."""
        names = [name for name in self.store.list(_FOLDER) if name.endswith(_MARK)]
        marks = {_step(name): read_json(self.store, f"{_FOLDER}/{name}") for name in names}
        return {step: (mark or {}).get("why", "the marker does not say why") for step, mark in marks.items()}

    def manifest(self, step: int) -> Manifest | None:
        """None where there is no checkpoint of this step.

        Raises:
            Damaged: there is, and its manifest cannot be read.
            StorageError: another version of this program has written it.
        """
        try:
            manifest = parse_manifest(self.store.read(f"{path_of(step)}/{_MANIFEST}"))
            if manifest.step != step:
                raise ValueError(f"{_MANIFEST} is of step {manifest.step}")
            return manifest
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise Damaged(f"{path_of(step)}: {error}") from error
        except StorageError as error:
            raise StorageError(f"{self.store.uri}/{path_of(step)}: {error}") from error

    def newest(self) -> int | None:
        """Of those that are committed, whether or not it turns out to be damaged."""
        return next((step for step in self.steps() if _MANIFEST in self.store.list(path_of(step))), None)

    def verify(self, manifest: Manifest, names: Iterable[str] | None = None) -> None:
        """Reads files and compares them with what their writers saw; by default all of them.

        Raises:
            Damaged: one is missing, is of another size or has other contents.
        """
        folder = path_of(manifest.step)
        with ThreadPoolExecutor(4) as threads:
            chosen = manifest.files if names is None else names
            list(threads.map(lambda name: self._verify_file(f"{folder}/{name}", manifest.files[name]), chosen))

    def _verify_file(self, name: str, expected: FileDigest) -> None:
        digest, num_bytes = hashlib.sha256(), 0
        try:
            while chunk := self.store.read(name, num_bytes, _READ_BYTES):
                digest.update(chunk)
                num_bytes += len(chunk)
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        except IsADirectoryError:
            raise Damaged(f"{name} is a folder") from None
        if num_bytes != expected.bytes:
            raise Damaged(f"{name} has {num_bytes} bytes where {expected.bytes} were written")
        if digest.hexdigest() != expected.sha256:
            raise Damaged(f"{name} has other contents than were written: its sha256 differs")

    def quarantine(self, step: int, why: str) -> None:
        """For good: nothing reads it any more, and it stays for whoever wants to look."""
        mark = json.dumps({"time_s": round(time.time(), 3), "why": why}).encode()
        self.store.commit(f"{path_of(step)}{_MARK}", mark)

    def write(self, step: int, name: str, chunks: Iterable[Bytes]) -> None:
        self.store.write(f"{path_of(step)}/{name}", chunks)

    def commit(self, manifest: Manifest) -> None:
        """From here on it is a checkpoint. What was damaged in its place has been replaced."""
        self.store.delete(f"{path_of(manifest.step)}{_MARK}")
        self.store.commit(f"{path_of(manifest.step)}/{_MANIFEST}", manifest.dump())

    def retire(
        self, newest: Manifest, config: CheckpointConfig, skip: frozenset[int], check: Callable[[], None]
    ) -> None:
        """Deletes what need not be kept, after it has read `newest` back: nothing goes before its successor is sure.

        Args:
            skip: steps that are left out of the run. A checkpoint that one of them went into is worth nothing.
            check: called before each deletion; may raise.

        Raises:
            Damaged: `newest` is; nothing has been deleted.
            OSError: something cannot be deleted; what can be has been.
        """
        self.verify(newest)
        refused: list[OSError] = []
        for names in self._outdated(newest, config, skip):
            check()
            try:
                for name in names:
                    self.store.delete(name)
            except OSError as error:
                refused.append(error)
        if refused:
            raise refused[0]

    def _outdated(self, newest: Manifest, config: CheckpointConfig, skip: frozenset[int]) -> list[tuple[str, ...]]:
        """What belongs together, in the order in which it is to go."""
        found = {step: self._manifest_or_none(step) for step in self.steps()}
        ours = [each for each in found.values() if each and each.skipped == left_out(skip, each.step)]
        keep = {newest.step, *kept(config, ours, skip)}
        unfinished = {step for step, manifest in found.items() if manifest is None and step > newest.step}
        names: list[tuple[str, ...]]
        # The manifest first, so that no half-deleted one looks whole.
        names = [(f"{path_of(step)}/{_MANIFEST}", path_of(step)) for step in found.keys() - keep - unfinished]
        names += [(path_of(step), f"{path_of(step)}{_MARK}") for step in self.quarantined() if step < min(keep)]
        half_written = [name for name in self.store.list(_FOLDER) if _MARK in name and not name.endswith(_MARK)]
        names += [(f"{_FOLDER}/{name}",) for name in half_written]  # markers, when a process was killed in the act
        # What lies beside the newest was left there by former attempts; others of its own may be writing there still.
        beside = [name for name in self.store.list(path_of(newest.step)) if name.startswith("attempt-")]
        return names + [(f"{path_of(newest.step)}/{name}",) for name in beside if name < of_attempt(newest.attempt)]

    def _manifest_or_none(self, step: int) -> Manifest | None:
        try:
            return self.manifest(step)
        except (Damaged, StorageError):
            return None


def path_of(step: int) -> str:
    return f"{_FOLDER}/step-{step:08d}"


def of_attempt(attempt: int) -> str:
    """How the names of its files begin; they sort by it."""
    return f"attempt-{attempt:06d}"


def left_out(skip: frozenset[int], step: int) -> list[int]:
    """What of `skip` a checkpoint of `step` lacks."""
    return sorted(each for each in skip if each <= step)


def _is_step(name: str) -> bool:
    return name.startswith("step-") and name.removeprefix("step-").isdigit()


def _step(name: str) -> int:
    return int(name.removeprefix("step-").removesuffix(_MARK))
