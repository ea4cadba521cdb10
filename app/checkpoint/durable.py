"""Checkpoints on storage during one attempt: find, load and save."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import NamedTuple

import torch.distributed as dist

from app.checkpoint.catalog import Catalog, Damaged, of_attempt, path_of, skipped_up_to
from app.checkpoint.manifest import FileDigest, Manifest
from app.checkpoint.shards import OPTIONAL, load_shards, shards_of, shards_to_write
from app.checkpoint.state import State
from app.checkpoint.writer import Dropped, PendingWrite, Superseded, Writer
from app.config import Config
from app.errors import StorageError
from app.parallel import Parallel
from app.run import events
from app.run.directory import RunDirectory
from app.run.owner import read_owner
from app.world.control import any_rank, gather_numbers
from app.world.runtime import Outcome, World

_POLL_S = 0.05
_DONE = "checkpoint/{}/done"  # store key by which the leader reports a committed step to the other ranks


class Stored(NamedTuple):
    """The newest known checkpoint."""

    step: int  # 0 if there is none
    age_s: float  # lower bound; inf if there is none


class Checkpoints:
    """Finds, loads and saves checkpoints in one attempt.

    `find` is a collective; `save` is one if the state is sharded.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        world: World,
        dataset: str,
        parallel: Parallel,
        writer: Writer,
        base: str = "",
    ) -> None:
        self._config = config.checkpoint
        self._limit_s = config.recovery.wait_s
        self._directory = directory
        self._catalog = Catalog(directory.store)
        self._world = world
        self._dataset = dataset  # fingerprint of the dataset
        self._base = base  # sha256 of the frozen parameters, if checkpoints leave them out
        self._newest = 0  # newest step on storage or being written
        self._writer = writer  # belongs to the process, and knows earlier attempts
        # Under DDP the leader holds the whole state and writes it alone, without waiting for other ranks.
        self._replicated = parallel.survivors_hold_all
        self._writes = parallel.writes(world)
        self._command = self._owning_command() if world.leader else ""
        writer.begin_attempt(world.attempt, world.amendments.skip, commits_alone=self._replicated and world.leader)

    def newest(self) -> Stored:
        """Return the newest known checkpoint, verified or not. A collective."""
        control = self._world.groups.control
        known = max(gather_numbers(self._writer.committed, control).tolist())
        if known:
            return Stored(int(known), 0.0)
        # No rank of this world has written a checkpoint. If storage does not answer, a snapshot is the best choice.
        newest = [Stored(0, math.inf)]
        if self._world.leader:
            with contextlib.suppress(OSError):
                candidate = self._candidate({})
                if candidate is not None:
                    newest = [Stored(candidate.step, age_s(candidate))]
        dist.broadcast_object_list(newest, src=0, group=control)
        return newest[0]

    def _owning_command(self) -> str:
        """Return the token of this attempt's command, "" if unknown."""
        with contextlib.suppress(OSError):
            owner = read_owner(self._directory.store)
            if owner and owner.attempt == self._world.attempt:
                return owner.token
        return ""

    def find(self) -> tuple[Manifest | None, dict[int, str]]:
        """Find the newest intact checkpoint, and damage of newer ones by step.

        Raises StorageError if the checkpoint belongs to another dataset or to other frozen parameters.
        """
        control = self._world.groups.control
        damaged: dict[int, str] = {}
        while True:
            candidate = [self._candidate(damaged) if self._world.leader else None]
            dist.broadcast_object_list(candidate, src=0, group=control)
            manifest = candidate[0]
            if manifest is None:
                return None, damaged
            # A checkpoint is used only after reading it back. Each rank reads a part of the files.
            why = ""
            try:
                self._catalog.verify(manifest, sorted(manifest.files)[self._world.rank :: self._world.size])
            except Damaged as error:
                why = str(error)
            whys: list[str] = [""] * self._world.size
            dist.all_gather_object(whys, why, group=control)
            if not any(whys):
                self._newest = manifest.step
                return manifest, damaged
            damaged[manifest.step] = next(filter(None, whys))
            if self._world.leader:
                self._catalog.quarantine(manifest.step, damaged[manifest.step])

    def _candidate(self, damaged: dict[int, str]) -> Manifest | None:
        """Return the newest manifest that fits this run."""
        for step in self._catalog.steps():
            try:
                manifest = self._catalog.manifest(step)
            except Damaged as error:
                damaged[step] = str(error)
                self._catalog.quarantine(step, str(error))
                continue
            if manifest is None or manifest.skipped != skipped_up_to(step, self._world.amendments.skip):
                continue
            # The state would fit the model, but it has seen other samples than the ledger records.
            if manifest.dataset != self._dataset:
                raise StorageError(
                    f"{self._directory / path_of(step)} was written over another dataset than this one. "
                    "Restore the data, or choose another run.name"
                )
            manifest.check_base(self._base, self._directory / path_of(step))
            return manifest
        return None

    def load(self, manifest: Manifest, state: State) -> None:
        """Fill this rank's part of `state`. Raises StorageError for another model."""
        self._world.progress.enter("load")
        load_shards(self._catalog.readers(manifest), shards_of(state), optional=OPTIONAL)

    def save(self, step: int, state: State, metrics: dict[str, float], ending: Outcome | None = None) -> None:
        """Copy the state for writing; at an attempt's `ending` also wait.

        Raises StorageError if the run ends, and storage takes longer than recovery.wait_s.
        """
        if ending is None:
            self._save(step, state, metrics)
            return
        # The run's last state must reach storage. A following world can restore survivors or snapshots instead.
        with contextlib.suppress(StorageError) if ending.kind == "resized" else contextlib.nullcontext():
            # `_save` skips a state while shards are still being written, so wait for these first.
            self.wait_for_commit(self._limit_s)
            self._save(step, state, metrics)
            self.wait_for_commit(self._limit_s)

    def _save(self, step: int, state: State, metrics: dict[str, float]) -> None:
        if step == self._newest:
            return
        # Shards are committed once all ranks have written theirs, so all ranks must write the same steps.
        if not self._replicated and any_rank(self._writer.busy, self._world.groups.control):
            return
        self._newest = step
        if self._writes:
            self.stage(step, state, metrics)

    def stage(self, step: int, state: State, metrics: dict[str, float]) -> None:
        """Copy the state and start its write, without a collective.

        A sharded state becomes a checkpoint only if all ranks call this.
        """
        shards = shards_to_write(state, replicas=self._replicated or self._world.leader)
        self._writer.put(step, shards, metrics, self)

    def reserve(self, state: State) -> None:
        """Allocate the buffer of the first copy while training continues.

        Touching new memory takes longer than filling it.
        """
        if self._writes:
            self._writer.reserve(shards_to_write(state, replicas=self._replicated or self._world.leader))

    def news(self) -> list[events.Event]:
        """Return the events of earlier calls of `save`. See `Writer.news`."""
        return self._writer.news()

    def wait_for_commit(self, limit_s: float) -> None:
        """Wait until everything is committed. Raises StorageError after `limit_s`."""
        if not self._writer.wait(lambda: self._world.progress.mark("checkpoint"), limit_s):
            raise StorageError(
                f"the checkpoint of step {self._newest} could not be written to {self._directory.uri} in "
                f"{limit_s:g} s: {self._writer.refused or 'storage does not answer'}"
            )

    # The writer's thread calls the following methods, in this order, and repeats them if storage refuses. So they must
    # not change `self`.

    def write_file(self, pending: PendingWrite, number: int) -> tuple[str, FileDigest]:
        """Write this rank's file, and return its name and digest."""
        # The number differs between all files of a process, so no file overwrites one that a manifest may list.
        name = f"{of_attempt(self._world.attempt)}-rank-{self._world.rank:05d}-{number:04d}.safetensors"
        sha256 = self._catalog.write(pending.step, name, pending.chunks())
        return name, FileDigest(sha256, pending.buffer.num_bytes)

    def commit(self, pending: PendingWrite, attempt: int) -> Manifest | None:
        """Write the manifest on the leader; return None elsewhere after the commit."""
        files = self._gather_files(pending)
        if not (self._replicated or self._world.leader):
            return None
        pending.check()
        self._check_owner(pending.step, attempt)
        manifest = self._manifest(pending.step, files, pending.metrics)
        self._catalog.commit(manifest)
        return manifest

    def _manifest(self, step: int, files: dict[str, FileDigest], metrics: dict[str, float]) -> Manifest:
        return Manifest(
            step=step,
            attempt=self._world.attempt,
            world_size=self._world.size,
            time_s=round(time.time(), 3),
            dataset=self._dataset,
            files=files,
            skipped=skipped_up_to(step, self._world.amendments.skip),
            metrics=metrics,
            base=self._base,
        )

    def _check_owner(self, step: int, attempt: int) -> None:
        """Raise Superseded if another command or a later attempt owns the run."""
        # A process that was cut off may return after another has taken over. Its own attempt may be later than that of
        # the copy, because a leader may write a copy that an earlier attempt had no time to write.
        owner = read_owner(self._directory.store)
        if owner and owner.attempt > attempt:
            who = f"attempt {owner.attempt} on {owner.host}"
            raise Superseded(f"{who} has taken over; step {step} is not committed")
        # A deleted run that has begun anew counts attempts from 1 again, so the token is compared as well.
        if self._command and (owner is None or owner.token != self._command):
            raise Superseded(f"another command owns the run, or it was deleted; step {step} is not committed")

    def _gather_files(self, pending: PendingWrite) -> dict[str, FileDigest]:
        """Return all ranks' files on the leader; wait for the commit elsewhere."""
        assert pending.file is not None
        name, digest = pending.file
        if self._replicated:
            return {name: digest}
        files = {}
        store = self._world.groups.store
        keys = [f"checkpoint/{pending.step}/{rank}" for rank in range(self._world.shard)]
        try:
            store.set(keys[self._world.rank], json.dumps([name, digest.sha256, digest.bytes]))
            while not store.check(keys if self._world.leader else [_DONE.format(pending.step)]):
                pending.check()
                # Polled, because a wait in the store would block all other threads that use the store.
                time.sleep(_POLL_S)
            if self._world.leader:
                for key in keys:
                    name, sha256, num_bytes = json.loads(store.get(key))
                    files[name] = FileDigest(sha256, num_bytes)
        except RuntimeError:  # the store ends with its attempt
            raise Dropped from None
        return files

    def finish(self, pending: PendingWrite, manifest: Manifest) -> events.Event:
        """Report the commit to all ranks, delete old checkpoints, return the event."""
        seconds = time.monotonic() - pending.began_s
        if not self._replicated:
            with contextlib.suppress(RuntimeError):  # the attempt has ended meanwhile
                self._world.groups.store.set(_DONE.format(pending.step), "")
        not_deleted = None
        try:
            self._catalog.retire(manifest, self._config, self._world.amendments.skip, pending.check)
        except Damaged as error:
            self._catalog.quarantine(pending.step, str(error))
            why = f"{error}, although it was written a moment ago"
            if self._replicated:
                raise OSError(why) from error
            # A retry is impossible, because the other ranks have released their copies.
            return events.CheckpointFailed(step=pending.step, error=why, needed_bytes=0)
        except OSError as error:
            not_deleted = str(error)  # the next checkpoint tries again to delete it
        except Dropped:
            pass  # another attempt deletes the old checkpoints
        return events.Checkpoint(
            step=pending.step,
            path=self._directory / path_of(pending.step),
            seconds=round(seconds, 4),
            blocked_s=round(pending.blocked_s, 4),
            bytes=manifest.num_bytes,
            not_deleted=not_deleted,
        )


def age_s(manifest: Manifest) -> float:
    """Return the seconds since a checkpoint's commit, by this machine's clock."""
    return max(0.0, time.time() - manifest.time_s)
