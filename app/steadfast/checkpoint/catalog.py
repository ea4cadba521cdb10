"""Checkpoints of a run on storage: find, verify, quarantine, commit, retire."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from steadfast.checkpoint.manifest import FileDigest, Manifest, parse_manifest
from steadfast.checkpoint.retention import steps_to_keep
from steadfast.config import CheckpointConfig
from steadfast.errors import StorageError
from steadfast.run.directory import EVENTS, STEPS
from steadfast.storage import Bytes, Read, Store, join
from steadfast.storage.documents import read_document, read_json
from steadfast.storage.jsonl import sync

_FOLDER = "checkpoints"
_MANIFEST = "manifest.json"
_MARK = ".quarantined.json"  # appended to the name of a folder that is no longer trusted
_READ_BYTES = 2**24


class Damaged(Exception):
    """A checkpoint differs from what was written; the message names the file."""


@dataclass(frozen=True)
class Catalog:
    """Checkpoints of a run, which are folders with a manifest.

    Their names are such as `checkpoints/step-00001200/`.
    """

    store: Store
    retention: CheckpointConfig = field(default_factory=CheckpointConfig)  # which checkpoints `retire` keeps
    # Manifests that `retire` has read, by step. Otherwise its reads would grow with the number of kept checkpoints.
    _known: dict[int, Manifest] = field(default_factory=dict, compare=False, repr=False)

    def location(self, step: int) -> str:
        """Return the path or URI of a checkpoint, for messages."""
        return join(self.store.uri, path_of(step))

    def steps(self) -> list[int]:
        """List steps of folders that are not quarantined, newest first.

        Folders may be unfinished or damaged.
        """
        names = self.store.list(_FOLDER)
        steps = []
        for name in names:
            if name.startswith("step-") and name.removeprefix("step-").isdigit() and name + _MARK not in names:
                steps.append(_step(name))
        return sorted(steps, reverse=True)

    def quarantined(self) -> dict[int, str]:
        """Return the reasons for quarantined checkpoints, by step."""
        reasons = {}
        for name in self.store.list(_FOLDER):
            if name.endswith(_MARK):
                mark = read_json(self.store, f"{_FOLDER}/{name}") or {}
                reasons[_step(name)] = mark.get("why", "the marker does not say why")
        return reasons

    def newest(self) -> int | None:
        """Return the newest committed step, which may prove to be damaged."""
        for step in self.steps():
            if _MANIFEST in self.store.list(path_of(step)):
                return step
        return None

    def manifest(self, step: int) -> Manifest | None:
        """Return the manifest of a checkpoint, None if not committed.

        Raises Damaged, or StorageError for another version.
        """
        try:
            manifest = parse_manifest(read_document(self.store, f"{path_of(step)}/{_MANIFEST}"))
            if manifest.step != step:
                raise ValueError(f"{_MANIFEST} is of step {manifest.step}")
            return manifest
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise Damaged(f"{path_of(step)}: {error}") from error
        except StorageError as error:
            raise StorageError(f"{self.store.uri}/{path_of(step)}: {error}") from error

    def readers(self, manifest: Manifest) -> list[Read]:
        """Return a reader for each file of a checkpoint."""
        return [partial(self.store.read, f"{path_of(manifest.step)}/{name}") for name in manifest.files]

    def verify(self, manifest: Manifest, names: Iterable[str] | None = None) -> None:
        """Compare files, by default all, with their digests. Raises Damaged."""
        folder = path_of(manifest.step)
        if names is None:
            names = manifest.files
        # Threads read and hash several files at once, because both release the GIL. A result must be read for the error
        # of its thread to be raised, hence the list.
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda name: self._verify_file(f"{folder}/{name}", manifest.files[name]), names))

    def _verify_file(self, name: str, expected: FileDigest) -> None:
        digest = hashlib.sha256()
        num_bytes = 0
        # A file may be larger than the memory that is left beside training, so it is read in pieces.
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
        """Mark a checkpoint as unusable; the files remain for inspection."""
        mark = json.dumps({"time_s": round(time.time(), 3), "why": why}).encode()
        self.store.commit(f"{path_of(step)}{_MARK}", mark)

    def write(self, step: int, name: str, chunks: Iterable[Bytes]) -> str:
        """Write a file of an uncommitted checkpoint, and return its sha256."""
        digest = hashlib.sha256()
        # A thread of its own hashes during the write, because both release the GIL.
        with ThreadPoolExecutor(1) as hasher:

            def hashed() -> Iterator[Bytes]:
                for chunk in chunks:
                    hasher.submit(digest.update, chunk)
                    yield chunk

            self.store.write(f"{path_of(step)}/{name}", hashed())
        return digest.hexdigest()

    def commit(self, manifest: Manifest) -> None:
        """Make the folder a checkpoint, and end any quarantine."""
        for stream in (STEPS, EVENTS):
            sync(self.store, stream)  # a checkpoint means nothing without the lines before it
        self._known.pop(manifest.step, None)
        self.store.delete(f"{path_of(manifest.step)}{_MARK}")
        self.store.commit(f"{path_of(manifest.step)}/{_MANIFEST}", manifest.dump())

    def retire(self, newest: Manifest, skip: frozenset[int], check: Callable[[], None]) -> None:
        """Delete the checkpoints that retention does not keep.

        `check` is called before each deletion and may raise. Raises OSError if a deletion fails; all other deletions
        have been made by then.
        """
        refused: OSError | None = None
        for names in self._outdated(newest, skip):
            check()
            try:
                for name in names:
                    self.store.delete(name)
            except OSError as error:
                refused = refused or error
        if refused:
            raise refused

    def _outdated(self, newest: Manifest, skip: frozenset[int]) -> list[list[str]]:
        """Return the names to delete: each list holds one checkpoint's, in order."""
        manifests: dict[int, Manifest | None] = {}
        valid: list[Manifest] = []
        for step in reversed(self.steps()):
            manifests[step] = None
            with contextlib.suppress(Damaged, StorageError):
                # A manifest of another version is unknown to this program, so its checkpoint counts as uncommitted.
                manifests[step] = manifest = self._known.get(step) or self.manifest(step)
                # A checkpoint that contains the update of a step left out since then is useless.
                if manifest and manifest.skipped == skipped_up_to(step, skip):
                    valid.append(manifest)
                    self._known[step] = manifest
        keep = {newest.step, *steps_to_keep(self.retention, valid, skip)}
        outdated = []
        for step, found in manifests.items():
            # A step without a manifest was never committed; if it is newer, it is still being written.
            if step not in keep and (found or step < newest.step):
                self._known.pop(step, None)
                # The manifest goes first, so that a half-deleted checkpoint never looks complete.
                outdated.append([f"{path_of(step)}/{_MANIFEST}", path_of(step)])
        leftovers = []
        for name in self.store.list(_FOLDER):
            if name.endswith(_MARK):
                if _step(name) < min(keep):
                    outdated.append([path_of(_step(name)), f"{_FOLDER}/{name}"])
            elif _MARK in name:  # the process that wrote this marker was killed meanwhile
                leftovers.append([f"{_FOLDER}/{name}"])
        # In the newest folder only files of former attempts are deleted: other ranks may still write files of its own.
        for name in self.store.list(path_of(newest.step)):
            if name.startswith("attempt-") and name < of_attempt(newest.attempt):
                leftovers.append([f"{path_of(newest.step)}/{name}"])
        return outdated + leftovers


def path_of(step: int) -> str:
    return f"{_FOLDER}/step-{step:08d}"


def of_attempt(attempt: int) -> str:
    """Return the prefix of an attempt's files, which sorts by attempt."""
    return f"attempt-{attempt:06d}"


def skipped_up_to(step: int, skip: frozenset[int]) -> list[int]:
    """Return the skipped steps that a checkpoint of `step` lacks."""
    return sorted(each for each in skip if each <= step)


def _step(name: str) -> int:
    return int(name.removeprefix("step-").removesuffix(_MARK))
