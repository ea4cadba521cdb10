"""Checkpoints on storage as one attempt sees them: found and read at its start, written while it trains."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial

import torch.distributed as dist

from app.agree import any_rank
from app.checkpoint.catalog import Catalog, Damaged, left_out, of_attempt, path_of
from app.checkpoint.manifest import FileDigest, Manifest
from app.checkpoint.shards import Piece, load_pieces, pieces_of, pieces_to_write
from app.checkpoint.state import Tensors
from app.checkpoint.writer import Dropped, Job, Superseded, Writer, failure
from app.config import Config
from app.errors import StorageError
from app.owner import read_owner
from app.rundir import RunDirectory
from app.runtime import Event, World
from app.storage import Bytes

_POLL_S = 0.05


class Checkpoints:
    """`find` is a collective; `save` and `finish` are where state is sharded. Replicated state is read and written by
    the leader alone, who has all of it, and nobody waits for anybody's word.

    Args:
        fingerprint: of the dataset.
        writer: the process's own. What it still has to write is dropped, unless this rank can commit it now as well.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        world: World,
        fingerprint: str,
        replicated: bool,
        writer: Writer,
    ) -> None:
        self._directory, self._world, self._fingerprint = directory, world, fingerprint
        self._replicated, self._writer = replicated, writer
        self._catalog, self._config = Catalog(directory.store), config.checkpoint
        self._limit_s = config.recovery.wait_s
        self._newest = 0  # on storage, or on its way there
        if not (replicated and world.leader and world.skip == writer.skip):
            writer.drop()
        if world.skip != writer.skip:
            writer.committed = 0
        writer.attempt, writer.skip = world.attempt, world.skip

    def find(self) -> tuple[Manifest | None, dict[int, str]]:
        """The newest checkpoint whose files are what was written; and the steps of those that were found damaged on the
        way, with the reason. They are quarantined.

        Each rank reads a part of the files, none of which is trusted before.

        Raises:
            StorageError: the newest was written over another dataset.
        """
        damaged: dict[int, str] = {}
        while True:
            candidate = [self._candidate(damaged) if self._world.leader else None]
            dist.broadcast_object_list(candidate, src=0, group=self._world.groups.control)
            manifest = candidate[0]
            if manifest is None:
                return None, damaged
            whys: list[str] = [""] * self._world.size
            dist.all_gather_object(whys, self._verify(manifest), group=self._world.groups.control)
            if not any(whys):
                self._newest = manifest.step
                return manifest, damaged
            damaged[manifest.step] = next(filter(None, whys))
            if self._world.leader:
                self._catalog.quarantine(manifest.step, damaged[manifest.step])

    def _candidate(self, damaged: dict[int, str]) -> Manifest | None:
        for step in self._catalog.steps():
            try:
                manifest = self._catalog.manifest(step)
            except Damaged as error:
                damaged[step] = str(error)
                self._catalog.quarantine(step, str(error))
                continue
            if manifest is None or manifest.skipped != left_out(self._world.skip, step):
                continue
            if manifest.dataset != self._fingerprint:
                raise StorageError(
                    f"{self._directory / path_of(step)} was written over another dataset than this one. "
                    "Restore the data, or choose another run.name"
                )
            return manifest
        return None

    def _verify(self, manifest: Manifest) -> str:
        try:
            self._catalog.verify(manifest, sorted(manifest.files)[self._world.rank :: self._world.size])
        except Damaged as error:
            return str(error)
        return ""

    def load(self, manifest: Manifest, state: dict[str, Tensors]) -> None:
        """Fills this rank's part of `state` in place, whatever world and strategy wrote it.

        Raises:
            StorageError: the checkpoint does not fit this model.
        """
        self._world.progress.enter("load")
        files = [f"{path_of(manifest.step)}/{name}" for name in manifest.files]
        load_pieces(self._directory.store, files, pieces_of(state))

    def save(self, step: int, state: dict[str, Tensors], metrics: dict[str, float], last: bool = False) -> None:
        """Returns once the state has been copied. A step that is on storage already, or that comes while sharded state
        is still being written, is left out.

        Args:
            last: nothing is left out, and it returns once the state is on storage.

        Raises:
            StorageError: it is to wait for storage, and that takes longer than recovery.wait_s.
        """
        if last:
            self.finish(self._limit_s)
        if step != self._newest and (self._replicated or not any_rank(self._writer.busy, self._world.groups.control)):
            self._newest = step
            if self._world.leader or not self._replicated:
                self.save_alone(step, state, metrics)
        if last:
            self.finish(self._limit_s)

    def prepare(self, state: dict[str, Tensors]) -> None:
        """Makes room for the first copy while training goes on: to touch new memory takes longer than to fill it."""
        if self._world.leader or not self._replicated:
            self._writer.prepare(self._pieces(state))

    def save_alone(self, step: int, state: dict[str, Tensors], metrics: dict[str, float]) -> None:
        """The same for a rank that asks nobody: one that has all of the state, or whom the others follow."""
        self._writer.put(step, self._pieces(state), partial(self._write, metrics))

    def _pieces(self, state: dict[str, Tensors]) -> list[Piece]:
        return pieces_to_write(state, replicas=self._replicated or self._world.leader)

    def news(self) -> list[Event]:
        """What has come of earlier calls of `save`; see `Writer.news`."""
        return self._writer.news()

    def finish(self, limit_s: float) -> None:
        """Waits until all that was saved is committed.

        Raises:
            StorageError: it was not in `limit_s`.
        """
        if not self._writer.wait(lambda: self._world.progress.mark("checkpoint"), limit_s):
            raise StorageError(
                f"the checkpoint of step {self._newest} could not be written to {self._directory.uri} in "
                f"{limit_s:g} s: {self._writer.refused or 'storage does not answer'}"
            )

    def _write(self, metrics: dict[str, float], job: Job) -> Event | None:
        """On the writer's thread; again and again, until it succeeds."""
        job.files = files = job.files or self._write_file(job)
        if not self._replicated:
            files = self._files_of_all(job)
            if not self._world.leader:
                self._writer.committed = job.step
                return None
        manifest = Manifest(
            step=job.step,
            attempt=self._world.attempt,
            world_size=self._world.size,
            time_s=round(time.time(), 3),
            dataset=self._fingerprint,
            files=files,
            skipped=left_out(self._world.skip, job.step),
            metrics=metrics,
        )
        job.check()
        owner = read_owner(self._directory.store)
        if owner and owner.attempt > self._writer.attempt:  # either this worker gets there too, or it is cut off
            raise Superseded(
                f"attempt {owner.attempt} on {owner.host} has taken over; step {job.step} is not committed"
            )
        self._catalog.commit(manifest)
        self._writer.committed = job.step
        seconds = time.monotonic() - job.began_s
        if not self._replicated:
            with contextlib.suppress(RuntimeError):  # the attempt has ended meanwhile
                self._world.groups.store.set(f"checkpoint/{job.step}/done", "")
        not_deleted = None
        try:
            self._catalog.retire(manifest, self._config, self._world.skip, job.check)
        except Damaged as error:
            self._catalog.quarantine(job.step, str(error))
            if self._replicated:  # it is worth another try; what was in the others' files is gone
                job.files = {}
                raise OSError(f"{error}, and was written a moment ago") from error
            return failure(job.step, f"{error}, and was written a moment ago", 0)
        except OSError as error:  # perhaps it can be deleted after the next one
            not_deleted = str(error)
        except Dropped:  # another attempt sees to it
            pass
        return {
            "event": "checkpoint",
            "step": job.step,
            "path": self._directory / path_of(job.step),
            "seconds": round(seconds, 4),  # from the copy to the commit
            "blocked_s": round(job.blocked_s, 4),  # those of them in which training waited
            "bytes": manifest.num_bytes,
            "not_deleted": not_deleted,
        }

    def _write_file(self, job: Job) -> dict[str, FileDigest]:
        """Under a name that no manifest lists."""
        self._writer.num_files += 1
        origin = f"{of_attempt(self._world.attempt)}-rank-{self._world.rank:05d}"
        name = f"{origin}-{self._writer.num_files:04d}.safetensors"
        digest = hashlib.sha256()
        with ThreadPoolExecutor(1) as hasher:

            def chunks() -> Iterator[Bytes]:
                for chunk in job.staged.chunks():
                    job.check()
                    hasher.submit(digest.update, chunk)
                    yield chunk

            self._catalog.write(job.step, name, chunks())
        return {name: FileDigest(digest.hexdigest(), job.staged.num_bytes)}

    def _files_of_all(self, job: Job) -> dict[str, FileDigest]:
        """For the leader; for the others it is over once the leader has committed them."""
        store, leader = self._world.groups.store, self._world.leader
        keys = [f"checkpoint/{job.step}/{rank}" for rank in range(self._world.size)]
        try:
            store.set(keys[self._world.rank], json.dumps({name: asdict(file) for name, file in job.files.items()}))
            while not store.check(keys if leader else [f"checkpoint/{job.step}/done"]):
                job.check()
                time.sleep(_POLL_S)  # a wait would keep the store from all other threads
            said = [json.loads(store.get(key)) for key in keys] if leader else []
            return {name: FileDigest(**file) for each in said for name, file in each.items()}
        except RuntimeError:  # the store ends with its attempt
            raise Dropped from None
