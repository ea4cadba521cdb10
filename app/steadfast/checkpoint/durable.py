"""Checkpoints on storage during one attempt: find, load and save."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from steadfast.checkpoint.catalog import Catalog, Damaged, of_attempt, skipped_up_to
from steadfast.checkpoint.manifest import FileDigest, Manifest
from steadfast.checkpoint.shards import (
    load_shards,
    names_in,
    optional_for,
    read_header,
    shards_of,
    shards_to_write,
    with_header,
)
from steadfast.checkpoint.state import State
from steadfast.checkpoint.writer import Dropped, PendingWrite, Superseded, Writer, checkpoint_failed
from steadfast.data.fingerprint import is_same_data
from steadfast.errors import StorageError
from steadfast.parallel import Parallel
from steadfast.parallel.digest import sum_of_bits
from steadfast.run import events
from steadfast.run.owner import read_owner
from steadfast.storage import Read
from steadfast.world.control import any_rank, gather_numbers, gather_objects
from steadfast.world.hardware import kind_of
from steadfast.world.runtime import Outcome, World

_POLL_S = 0.05
# Keys of the attempt's store, of a step and a rank:
_FILE = "checkpoint/{}/file/{}"  # the rank's file and its digest
_READ = "checkpoint/{}/read/{}"  # what is wrong with the file that the rank has read back, "" if nothing is
_DONE = "checkpoint/{}/done"  # the leader has committed the step
_DIGESTS = "digests/{1}"  # of a rank alone: the newest step, kind of processor and digests of tensors


class Stored(NamedTuple):
    """The newest known checkpoint."""

    step: int  # 0 if there is none
    age_s: float  # lower bound; inf if there is none


class Fingerprints(NamedTuple):
    """Digests of the data and weights that a checkpoint needs and does not hold."""

    dataset: str
    base: str = ""  # sha256 of the frozen parameters, if checkpoints leave them out


class Checkpoints:
    """Finds, loads and saves checkpoints in one attempt.

    `find` is a collective; `save` is one if the state is sharded.
    """

    def __init__(
        self, catalog: Catalog, world: World, parallel: Parallel, writer: Writer, fingerprints: Fingerprints
    ) -> None:
        self._catalog = catalog
        self.world = world
        self._fingerprints = fingerprints
        self._news: list[events.Event] = []  # of checkpoints that are not used, until `news` returns them
        self._newest = 0  # newest step on storage or being written
        self._measured: set[str] = set()  # names of the metrics that its manifest has
        self._writer = writer  # belongs to the process, and knows earlier attempts
        # Under DDP every rank holds the whole state, and the leader writes it alone, without waiting for other ranks.
        self.replicated = parallel.survivors_hold_all
        self.compares = world.replicate > 1
        self._kind = kind_of(world.groups.device) if self.compares else ""
        self._command = self._owning_command() if world.leader else ""
        writer.begin_attempt(world.attempt, world.amendments.skip, commits_alone=self.replicated and world.leader)

    def newest(self) -> Stored:
        """Return the newest known checkpoint, verified or not. A collective."""
        control = self.world.groups.control
        known = max(gather_numbers(self._writer.committed, control).tolist())
        if known:
            return Stored(int(known), 0.0)
        # No rank of this world has written a checkpoint. If storage does not answer, a snapshot is the best choice.
        newest = [Stored(0, math.inf)]
        if self.world.leader:
            with contextlib.suppress(OSError):
                candidate = self._candidate()
                if candidate is not None:
                    newest = [Stored(candidate.step, age_s(candidate))]
        dist.broadcast_object_list(newest, src=0, group=control)
        return newest[0]

    def _owning_command(self) -> str:
        """Return the token of this attempt's command, "" if unknown."""
        # Storage may not answer now. Without the token `_check_owner` still compares the attempts.
        with contextlib.suppress(OSError):
            owner = read_owner(self._catalog.store)
            if owner and owner.attempt == self.world.attempt:
                return owner.token
        return ""

    def find(self) -> Manifest | None:
        """Find the newest intact checkpoint, and set damaged ones aside.

        Raises StorageError if the checkpoint belongs to another dataset or to other frozen parameters.
        """
        control = self.world.groups.control
        while True:
            # All ranks must load the same checkpoint, and storage may change between the looks of two ranks.
            candidate: list[Manifest | None] = [None]
            if self.world.leader:
                candidate = [self._candidate()]
            dist.broadcast_object_list(candidate, src=0, group=control)
            manifest = candidate[0]
            if manifest is None:
                return None
            # A checkpoint is used only after reading it back. Each rank reads a part of the files.
            why = ""
            try:
                self._catalog.verify(manifest, sorted(manifest.files)[self.world.rank :: self.world.size])
            except Damaged as error:
                why = str(error)
            whys: list[str] = gather_objects(why, control)
            if not any(whys):
                self._newest, self._measured = manifest.step, set(manifest.metrics)
                return manifest
            if self.world.leader:
                self._quarantine(manifest.step, next(filter(None, whys)))

    def _quarantine(self, step: int, why: str) -> None:
        self._catalog.quarantine(step, why)
        text = f"checkpoint at step {step} is damaged and will not be used: {why}"
        self._news.append(events.Notice(event="checkpoint_quarantined", text=text, step=step, error=why))

    def _candidate(self) -> Manifest | None:
        """Return the newest manifest that fits this run."""
        for step in self._catalog.steps():
            try:
                manifest = self._catalog.manifest(step)
            except Damaged as error:
                self._quarantine(step, str(error))
                continue
            if manifest is None:
                continue
            if manifest.skipped != skipped_up_to(step, self.world.amendments.skip):
                text = f"checkpoint at step {step} is not used and will be deleted: it holds a step that was left out"
                notice = events.Notice(event="checkpoint_passed_over", text=text, step=step)
                if notice not in self._news:
                    self._news.append(notice)
                continue
            # The state would fit the model, but it has seen other samples than the ledger records.
            if not is_same_data(manifest.dataset, self._fingerprints.dataset):
                raise StorageError(
                    f"{self._catalog.location(step)} was written over another dataset than this one. "
                    "Restore the data, or choose another run.name"
                )
            manifest.check_base(self._fingerprints.base, self._catalog.location(step))
            return manifest
        return None

    def names(self, manifest: Manifest) -> set[str]:
        """Return the names of all tensors in a checkpoint. A collective."""
        return names_in(map(read_header, self._with_headers(self._catalog.readers(manifest))))

    def load(self, manifest: Manifest, state: State) -> None:
        """Fill this rank's part of `state`. A collective if the state is sharded.

        Raises StorageError for another model.
        """
        self.world.progress.enter("load")
        shards = shards_of(state)
        files = self._catalog.readers(manifest)
        if not self.replicated:
            files = self._with_headers(files)
        load_shards(files, shards, optional=optional_for(shards))

    def _with_headers(self, files: list[Read]) -> list[Read]:
        """Return readers that know the headers of all files, each of which one rank has read. A collective."""
        world = self.world
        mine = [read_header(file) for file in files[world.rank :: world.size]]
        found = gather_objects(mine, world.groups.control)
        return [with_header(file, found[i % world.size][i // world.size]) for i, file in enumerate(files)]

    def save(
        self,
        step: int,
        state: State,
        metrics: dict[str, float],
        ending: Outcome | None = None,
        limit_s: float = math.inf,
    ) -> None:
        """Copy the state for writing; at an attempt's `ending` also wait.

        Raises StorageError if the run ends, and storage takes longer than `limit_s`.
        """
        if ending is None:
            self._save(step, state, metrics)
            return
        try:
            # `_save` skips a state while shards are still being written, so wait for these first.
            self.wait_for_commit(limit_s)
            self._save(step, state, metrics)
            self.wait_for_commit(limit_s)
        except StorageError:
            # The run's last state must reach storage. A following world can restore survivors or snapshots instead.
            if ending.kind != "resized":
                raise

    def has(self, step: int, metrics: Collection[str]) -> bool:
        """Return whether this attempt has restored or saved the checkpoint of `step` with these metrics."""
        # A process that lost its peers in a validation writes the state without metrics.
        return step == self._newest and self._measured.issuperset(metrics)

    def lacks(self, step: int, metrics: Collection[str]) -> bool:
        """Return whether no checkpoint of `step` with these metrics is on storage or on its way. A collective."""
        control = self.world.groups.control
        found = self._writer.holds(step)
        # A commit under way may have ended meanwhile, so storage is read after the writer.
        if self.world.leader and not found:
            with contextlib.suppress(OSError):
                manifest = self._candidate()
                found = manifest is not None and manifest.step == step and manifest.metrics.keys() >= set(metrics)
        return not any_rank(found, control)

    def _save(self, step: int, state: State, metrics: dict[str, float]) -> None:
        if self.has(step, metrics):
            return
        # Shards are committed once all ranks have written theirs, so all ranks must write the same steps.
        if not self.replicated and any_rank(self._writer.busy, self.world.groups.control):
            return
        self._newest, self._measured = step, set(metrics)
        if self.world.in_first_replica:
            self.stage(step, state, metrics)
        elif self.compares:
            digests = list(self._digests(state).values())
            with contextlib.suppress(Dropped):  # training notices by itself that the attempt has ended
                self._tell(_DIGESTS, step, json.dumps([step, self._kind, digests]))

    def stage(self, step: int, state: State, metrics: dict[str, float]) -> None:
        """Copy the state and start its write, without a collective.

        A sharded state becomes a checkpoint only if all ranks call this.
        """
        shards = shards_to_write(state, self.world)
        self._writer.put(step, shards, metrics, self)

    def differing(self, state: State) -> tuple[str, dict[str, tuple[int, ...]]] | None:
        """Return a tensor that ranks hold differently, and the ranks by its digest. A collective.

        The result is None if all ranks that hold the same tensors on processors of the same kind hold equal ones.
        """
        world = self.world
        found = gather_objects((self._kind, self._digests(state)), world.groups.control)
        peers: dict[tuple[int, str], list[int]] = {}  # by their part of the model and the kind of their processor
        for rank, (kind, _) in enumerate(found):
            peers.setdefault((rank % world.replica_size, kind), []).append(rank)
        for ranks in peers.values():
            for name in found[ranks[0]][1]:
                by_digest: dict[str, tuple[int, ...]] = {}
                for rank in ranks:
                    digest = f"{found[rank][1].get(name, 0) % 2**64:016x}"
                    by_digest[digest] = (*by_digest.get(digest, ()), rank)
                if len(by_digest) > 1:
                    return name, by_digest
        return None

    def _digests(self, state: State) -> dict[str, int]:
        return digests_of((shard.name, shard.tensor) for shard in shards_to_write(state, self.world))

    def reserve(self, state: State) -> None:
        """Allocate the host memory of checkpoints, on another thread.

        A checkpoint first copies the state into this memory. Allocating the memory takes longer than the copy.
        """
        if self.world.in_first_replica:
            self._writer.reserve(shards_to_write(state, self.world))

    def news(self) -> list[events.Event]:
        """Return the new events of checkpoints that are not used, and of earlier calls of `save`. See `Writer.news`."""
        news, self._news = self._news, []
        return [*news, *self._writer.news()]

    def wait_for_commit(self, limit_s: float) -> None:
        """Wait until everything is committed. Raises StorageError after `limit_s`."""
        if not self._writer.wait(lambda: self.world.progress.mark("checkpoint"), limit_s):
            what = f"{self._catalog.store.uri}: the checkpoint of step {self._newest}"
            raise StorageError.cannot_write(what, self._writer.refused or f"storage has not answered in {limit_s:g} s")

    # The writer's thread calls the following public methods, in this order, and repeats them if storage refuses. So
    # they must not change `self`.

    def agree(self, pending: PendingWrite) -> bool:
        """Return whether all ranks that hold the same tensors hold equal values."""
        world = self.world
        ranks = range(world.rank + world.replica_size, world.size, world.replica_size)
        keys = [_DIGESTS.format(pending.step, rank) for rank in ranks]
        own = list(digests_of(pending.buffer.copies()).values())
        while True:
            told = [json.loads(each) for each in self._ask(keys, pending)]
            if all(step == pending.step for step, _, _ in told):
                # Processors of other kinds round differently.
                return all(digests == own for _, kind, digests in told if kind == self._kind)
            if any(step > pending.step for step, _, _ in told):
                raise Dropped  # this rank is about to copy a newer state
            pending.check()
            time.sleep(_POLL_S)

    def write_file(self, pending: PendingWrite, number: int) -> tuple[str, FileDigest]:
        """Write this rank's file, and return its name and digest."""
        # The number differs between all files of a process, so no file overwrites one that a manifest may list.
        name = f"{of_attempt(self.world.attempt)}-rank-{self.world.rank:05d}-{number:04d}.safetensors"
        sha256 = self._catalog.write(pending.step, name, pending.chunks())
        return name, FileDigest(sha256, pending.buffer.num_bytes)

    def commit(self, pending: PendingWrite, attempt: int) -> Manifest | None:
        """Write the manifest on the leader; elsewhere read a file back after the commit, and return None."""
        files = self._gather_files(pending)
        if not (self.replicated or self.world.leader):
            why = ""
            try:
                self._catalog.verify(self._manifest(pending.step, files, {}))
            except Damaged as error:
                why = str(error)
            self._tell(_READ, pending.step, why)
            return None
        pending.check()
        self._check_owner(pending.step, attempt)
        manifest = self._manifest(pending.step, files, pending.metrics)
        self._catalog.commit(manifest)
        return manifest

    def _manifest(self, step: int, files: dict[str, FileDigest], metrics: dict[str, float]) -> Manifest:
        amendments = self.world.amendments
        return Manifest(
            step=step,
            attempt=self.world.attempt,
            world_size=self.world.size,
            time_s=round(time.time(), 3),
            dataset=self._fingerprints.dataset,
            files=files,
            skipped=skipped_up_to(step, amendments.skip),
            metrics=metrics,
            base=self._fingerprints.base,
            ends=[list(end) for end in amendments.ends],
            forward_size=amendments.forward_size,
        )

    def _check_owner(self, step: int, attempt: int) -> None:
        """Raise Superseded if another command or a later attempt owns the run."""
        # A process that was cut off may return after another has taken over. Its own attempt may be later than that of
        # the copy, because a leader may write a copy that an earlier attempt had no time to write.
        owner = read_owner(self._catalog.store)
        if owner and owner.attempt > attempt:
            who = f"attempt {owner.attempt} on {owner.host}"
            raise Superseded(f"{who} has taken over; step {step} is not committed")
        # A deleted run that has begun anew counts attempts from 1 again, so the token is compared as well.
        if self._command and (owner is None or owner.token != self._command):
            raise Superseded(f"another command owns the run, or it was deleted; step {step} is not committed")

    def _gather_files(self, pending: PendingWrite) -> dict[str, FileDigest]:
        """Return all ranks' files on the leader; elsewhere that of the next rank, after the commit."""
        assert pending.file is not None
        name, digest = pending.file
        if self.replicated:
            return {name: digest}
        step, num_ranks = pending.step, self.world.replica_size
        self._tell(_FILE, step, json.dumps([name, digest.sha256, digest.bytes]))
        ranks = list(range(num_ranks))
        if not self.world.leader:
            self._ask([_DONE.format(step)], pending)
            ranks = [(self.world.rank + 1) % num_ranks]
        files = {}
        for told in self._ask([_FILE.format(step, rank) for rank in ranks], pending):
            name, sha256, num_bytes = json.loads(told)
            files[name] = FileDigest(sha256, num_bytes)
        return files

    def _tell(self, key: str, step: int, value: str) -> None:
        """Set this rank's key. Raises Dropped if the attempt has ended."""
        try:
            self.world.groups.store.set(key.format(step, self.world.rank), value)
        except RuntimeError:  # the store ends with its attempt
            raise Dropped from None

    def _ask(self, keys: list[str], pending: PendingWrite) -> list[bytes]:
        """Wait for the values of keys. Raises Dropped if the attempt ends."""
        store = self.world.groups.store
        try:
            while not store.check(keys):
                pending.check()
                # Polled, because a wait in the store would block all other threads that use the store.
                time.sleep(_POLL_S)
            values: list[bytes] = store.multi_get(keys)
        except RuntimeError:
            raise Dropped from None
        return values

    def finish(self, pending: PendingWrite, manifest: Manifest) -> events.Event:
        """Report the commit to all ranks, delete old checkpoints, return the event."""
        seconds = time.monotonic() - pending.began_s
        not_deleted = None
        try:
            # No checkpoint is deleted before its successor has been read back.
            self._verify(manifest, pending)
            self._catalog.retire(manifest, self.world.amendments.skip, pending.check)
        except Damaged as error:
            self._catalog.quarantine(pending.step, str(error))
            why = f"{error}, although it was written a moment ago"
            if self.replicated:
                raise OSError(why) from error
            # A retry is impossible, because the other ranks have released their copies.
            return checkpoint_failed(pending.step, why)
        except OSError as error:
            not_deleted = str(error)  # the next checkpoint tries again to delete it
        except Dropped:
            pass  # another attempt deletes the old checkpoints
        return events.Checkpoint(
            step=pending.step,
            path=self._catalog.location(pending.step),
            seconds=round(seconds, 4),
            blocked_s=round(pending.blocked_s, 4),
            bytes=manifest.num_bytes,
            not_deleted=not_deleted,
        )

    def _verify(self, manifest: Manifest, pending: PendingWrite) -> None:
        """Read a committed checkpoint back. Raises Damaged, and Dropped if the attempt ends."""
        if self.replicated:
            self._catalog.verify(manifest)
            return
        # Each rank reads the file of the next rank, as all files may be more than one rank can read.
        self._tell(_DONE, pending.step, "")
        num_ranks = self.world.replica_size
        self._catalog.verify(manifest, [list(manifest.files)[1 % num_ranks]])
        for why in self._ask([_READ.format(pending.step, rank) for rank in range(1, num_ranks)], pending):
            if why:
                raise Damaged(why.decode())


def digests_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return the digests of all tensors but the hooks', in the order of names."""
    # Hooks may keep a state of their own on each rank.
    return {name: sum_of_bits(tensor) for name, tensor in sorted(tensors) if not name.startswith("hooks.")}


def age_s(manifest: Manifest) -> float:
    """Return the seconds since a checkpoint's commit, by this machine's clock."""
    return max(0.0, time.time() - manifest.time_s)
