"""Commit of a step without collectives, from parts written by single ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

from torch import Tensor

from steadfast.checkpoint.catalog import of_attempt, path_of
from steadfast.checkpoint.durable import Checkpoints
from steadfast.checkpoint.manifest import FileDigest, Manifest
from steadfast.checkpoint.node_memory import NodeMemory, SnapshotId
from steadfast.checkpoint.shards import StagingBuffer, shards_to_write
from steadfast.checkpoint.snapshots import origin_of, stored_copies
from steadfast.checkpoint.state import State
from steadfast.checkpoint.writer import Dropped, PendingWrite
from steadfast.run.events import Event
from steadfast.storage import Bytes
from steadfast.storage.documents import read_json

_OTHERS_S = 10.0  # time to wait for the next part of another rank
_POLL_S = 0.1
_CHUNK_BYTES = 2**24


class Parts(Checkpoints):
    """Writes parts of the state, and commits once all parts exist."""

    _at_once = False  # see `save_part`
    _others_follow = True

    def begin(self, command: str) -> None:
        """Check that the command with this token owns the run. Raises Superseded."""
        self._command = command
        self.compares = False  # the other ranks may be gone
        self._check_owner(self._newest, self.world.attempt)

    def save_part(self, step: int, state: State, limit_s: float, at_once: bool, others_follow: bool) -> bool:
        """Write this rank's part of the state; return whether `step` is committed.

        Args:
            at_once: whether this rank writes and commits without waiting for the commit of another rank.
            others_follow: whether the other ranks write their parts as well.

        Raises:
            StorageError: storage takes longer than `limit_s`.
        """
        self._at_once, self._others_follow = at_once, others_follow
        # Every replica holds all parts, so the replicas try one after another.
        replica = self.world.rank // self.world.replica_size
        if replica and not at_once and self._wait_until(lambda: self._has_commit_of(step), min(replica, 4) * _OTHERS_S):
            return True
        self._newest = step
        self._writer.put(step, shards_to_write(state, self.world), {}, self)
        self.wait_for_commit(limit_s)
        return self._writer.committed == step

    def commit(self, pending: PendingWrite, attempt: int) -> Manifest | None:
        """Commit the step once all parts exist; None if another rank has.

        Raises Dropped if parts are missing.
        """
        assert pending.file is not None
        snapshot = SnapshotId(pending.step, self.world.attempt, self.world.replica_size)
        self._record(snapshot, self.world.part, *pending.file)
        return self._commit_whole(snapshot, attempt)

    def _verify(self, manifest: Manifest, pending: PendingWrite) -> None:
        self._catalog.verify(manifest)  # the other ranks may be gone

    def save_copies(self, memory: NodeMemory, state: State) -> Event | None:
        """Write the newest complete snapshot in node memory as a checkpoint.

        Nothing is written if a checkpoint of the same or a later step exists.

        Args:
            state: a state with the same tensors as the snapshot; the values of the tensors do not matter.

        Returns:
            The event that reports the checkpoint; None if this rank has not committed the checkpoint.

        Raises:
            OSError: storage refuses, or the snapshot is damaged.
        """
        origin = origin_of("".join(self._fingerprints), state)
        copies: dict[SnapshotId, list[tuple[int, int, int, int]]] = {}  # rank, buffer, first byte, length
        for number, label in stored_copies(memory, origin, self.world.amendments.skip).items():
            for rank, start, num_bytes in label.files:
                copies.setdefault(label.snapshot, []).append((rank, number, start, num_bytes))
        for snapshot in sorted(copies, reverse=True):
            if snapshot.step <= (self._catalog.newest() or 0):
                return None
            pending = PendingWrite(snapshot.step, {}, StagingBuffer(), self, time.monotonic(), 0.0)
            for rank, number, start, num_bytes in copies[snapshot]:
                if rank not in self._recorded(snapshot):
                    memory.verify(number)
                    self._write_copy(snapshot, rank, memory.open(number)[start : start + num_bytes])
            try:
                manifest = self._commit_whole(snapshot, self.world.attempt)
            except Dropped:
                continue  # parts of this snapshot were lost with another node
            if manifest is None:
                return None
            return self.finish(pending, manifest)
        return None

    def _write_copy(self, snapshot: SnapshotId, rank: int, data: Tensor) -> None:
        def chunks() -> Iterator[Bytes]:
            for part in data.split(_CHUNK_BYTES):
                self.world.progress.mark("checkpoint")  # keeps the watchdog from taking a long write for a hang
                yield memoryview(part.numpy().data)

        name = f"{of_attempt(self.world.attempt)}-rank-{self.world.rank:05d}-copy-{rank:05d}.safetensors"
        sha256 = self._catalog.write(snapshot.step, name, chunks())
        self._record(snapshot, rank, name, FileDigest(sha256, len(data)))

    def _commit_whole(self, snapshot: SnapshotId, attempt: int) -> Manifest | None:
        """Commit a snapshot once all of its parts are recorded. See `commit`."""
        while len(files := self._recorded(snapshot)) < snapshot.num_ranks:
            if not (self._others_follow and self._wait_until(partial(self._has_more_parts, snapshot, len(files)))):
                raise Dropped
        # All ranks find all parts at the same time, and one manifest is enough: the rank that raised commits first.
        if not self._at_once and self._wait_until(lambda: self._has_commit_of(snapshot.step)):
            return None
        self._check_owner(snapshot.step, attempt)
        manifest = self._manifest(snapshot.step, dict(files.values()), {})
        self._catalog.commit(manifest)
        return manifest

    def _wait_until(self, condition: Callable[[], bool], limit_s: float = _OTHERS_S) -> bool:
        """Wait up to `limit_s` for a condition on storage."""
        until_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > until_s:
                return False
            self.world.progress.mark("checkpoint")
            time.sleep(_POLL_S)
        return True

    def _has_more_parts(self, snapshot: SnapshotId, num_parts: int) -> bool:
        return len(self._recorded(snapshot)) > num_parts

    def _has_commit_of(self, step: int) -> bool:
        return (self._catalog.newest() or 0) >= step

    def _record(self, snapshot: SnapshotId, rank: int, name: str, digest: FileDigest) -> None:
        """Record on storage which file holds part `rank` of a snapshot."""
        content = {"snapshot": list(snapshot), "name": name, **asdict(digest)}
        self._catalog.store.commit(self._record_of(snapshot, rank), json.dumps(content).encode())

    def _recorded(self, snapshot: SnapshotId) -> dict[int, tuple[str, FileDigest]]:
        """Return the recorded files of a snapshot, by part."""
        names = self._catalog.store.list(path_of(snapshot.step))
        found = {}
        for rank in range(snapshot.num_ranks):
            file = self._record_of(snapshot, rank)
            if file.rpartition("/")[2] not in names:
                continue
            content = read_json(self._catalog.store, file) or {}
            if content.get("snapshot") == list(snapshot):
                found[rank] = content["name"], FileDigest(content["sha256"], content["bytes"])
        return found

    def _record_of(self, snapshot: SnapshotId, rank: int) -> str:
        return f"{path_of(snapshot.step)}/{of_attempt(self.world.attempt)}-part-{rank:05d}.json"
