"""Checkpoints on storage: a folder a step, sharded by DCP, and committed by a manifest that is written last."""

from __future__ import annotations

import hashlib
import shutil
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from app.checkpoint.state import Tensors
from app.errors import RunConflict, StorageError
from app.files import read_json, write_json
from app.owner import read_owner
from app.rundir import RunDirectory
from app.runtime import World

VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What makes a folder a checkpoint. `files` maps each name to its sha256 and size in bytes; `skipped` are the steps
    up to this one that were left out."""

    version: int
    step: int
    attempt: int
    world_size: int
    dataset: str  # fingerprint
    files: dict[str, dict[str, Any]]
    skipped: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(int(file["bytes"]) for file in self.files.values())


@dataclass(frozen=True)
class Committed:
    path: Path
    manifest: Manifest
    seconds: float


class CheckpointStore:
    """The checkpoints of one run, as one attempt sees them. `load` is a collective of `group`, `save` one too unless
    the state is replicated: then the leader, who has all of it, writes it alone, and nobody waits for anybody's word.
    """

    def __init__(
        self,
        directory: RunDirectory,
        world: World,
        group: dist.ProcessGroup,
        fingerprint: str,
        keep_last: int,
        replicated: bool,
    ) -> None:
        self._directory, self._world, self._group = directory, world, group
        self._fingerprint, self._keep_last, self._replicated = fingerprint, keep_last, replicated

    def newest(self) -> int:
        """The step of the newest whole checkpoint, 0 if there is none. Read from storage: nothing else is trusted."""
        for path in sorted(self._directory.checkpoints.glob("step-*"), reverse=True):
            manifest = read_manifest(path)
            if manifest and self._is_ours(manifest) and _is_whole(path, manifest):
                return manifest.step
        return 0

    def load(self, step: int, state: dict[str, Tensors]) -> None:
        """Fills `state` in place, whatever world and strategy wrote it.

        Raises:
            StorageError: the checkpoint does not fit this model, or its dataset was another.
        """
        self._world.progress.enter("load")
        path = self._path(step)
        manifest = read_manifest(path)
        if manifest is None or manifest.dataset != self._fingerprint:
            raise StorageError(
                f"{path} was written over another dataset than this one. Restore the data, or choose another run.name"
            )
        import torch.distributed.checkpoint as dcp  # takes longer to import than all else here; few attempts need it

        dcp.load(state, checkpoint_id=path, process_group=self._group)

    def save(self, step: int, state: dict[str, Tensors]) -> Committed | None:
        """Writes and commits. None on ranks other than the leader, and when `step` is already there.

        Raises:
            RunConflict: a later attempt owns the run by now; nothing was committed.
        """
        began, path = time.monotonic(), self._path(step)
        if self._replicated and not self._world.leader:
            return None
        if self._agreed_to_skip(path):
            return None
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, sync_files=True)
        with warnings.catch_warnings(action="ignore"):  # that it saves in a single process, which is meant
            dcp.save(state, storage_writer=writer, process_group=self._group, no_dist=self._replicated)
        return self._commit(step, path, began) if self._world.leader else None

    def _agreed_to_skip(self, path: Path) -> bool:
        """The leader looks, and clears what an attempt that died here left; all who write must go the same way."""
        answer = [False]
        if self._world.leader:
            answer = [self._is_ours(read_manifest(path))]
            if not answer[0]:
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir(parents=True)
        if not self._replicated:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        return answer[0]

    def _commit(self, step: int, path: Path, began: float) -> Committed:
        files = {file.name: _digest(file) for file in sorted(path.iterdir())}
        manifest = Manifest(
            version=VERSION,
            step=step,
            attempt=self._world.attempt,
            world_size=self._world.size,
            dataset=self._fingerprint,
            files=files,
            skipped=self._skipped(step),
        )
        owner = read_owner(self._directory.owner)
        if owner and owner.attempt > self._world.attempt:
            raise RunConflict(f"attempt {owner.attempt} on {owner.host} has taken over; step {step} is not committed")
        write_json(path / "manifest.json", asdict(manifest))
        self._retain()
        return Committed(path, manifest, time.monotonic() - began)

    def _retain(self) -> None:
        paths = sorted(self._directory.checkpoints.glob("step-*"))
        ours = [path for path in paths if self._is_ours(read_manifest(path))]
        for path in {*paths}.difference(ours[-self._keep_last :]):
            (path / "manifest.json").unlink(missing_ok=True)  # first, so that no half-deleted one looks whole
            shutil.rmtree(path, ignore_errors=True)

    def _is_ours(self, manifest: Manifest | None) -> bool:
        """Not so where a step went into it that has been found to be bad since."""
        return manifest is not None and manifest.skipped == self._skipped(manifest.step)

    def _skipped(self, step: int) -> list[int]:
        return sorted(each for each in self._world.skip if each <= step)

    def _path(self, step: int) -> Path:
        return self._directory.checkpoints / f"step-{step:08d}"


def read_manifest(path: Path) -> Manifest | None:
    found = read_json(path / "manifest.json")
    return Manifest(**found) if found and found.get("version") == VERSION else None


def _is_whole(path: Path, manifest: Manifest) -> bool:
    return all(
        (path / name).is_file() and (path / name).stat().st_size == file["bytes"]
        for name, file in manifest.files.items()
    )


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}
