"""Background thread that writes checkpoints across attempts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from steadfast.backoff import delays
from steadfast.checkpoint.manifest import FileDigest, Manifest
from steadfast.checkpoint.shards import FileLayout, Shard, StagingBuffer
from steadfast.run.events import Event, Notice
from steadfast.storage import Bytes
from steadfast.units import size

_TELL_EVERY_S = 60.0
_FIRST_DELAY_S = 1.0  # between two tries
_LONGEST_DELAY_S = 30.0


def checkpoint_failed(step: int, error: str, needed_bytes: int = 0) -> Notice:
    """Return the event that storage has refused a checkpoint.

    Args:
        needed_bytes: bytes that the checkpoint needs, 0 if unknown.
    """
    text = f"checkpoint at step {step} is not written; training continues, and a retry or the next checkpoint"
    text += f" follows: {error}"
    if needed_bytes:
        text += f" ({size(needed_bytes)} are needed)"
    return Notice(event="checkpoint_failed", text=text, step=step, error=error, needed_bytes=needed_bytes)


class Dropped(Exception):
    """A pending write is no longer wanted."""


# An OSError, so that the write is retried: this process may belong to the newer attempt, and only join it late.
class Superseded(OSError):
    """Another attempt has begun, so this one may not commit."""


@dataclass(eq=False)
class PendingWrite:
    """A checkpoint that this rank has copied and not committed yet."""

    step: int
    metrics: dict[str, float]
    buffer: StagingBuffer
    target: Target
    began_s: float  # when the copy began
    blocked_s: float  # how long training waited for the copy
    file: tuple[str, FileDigest] | None = None  # of this rank, once it is on storage
    dropped: bool = False
    agreed: bool = True  # whether the other ranks that hold the same tensors are known to hold equal ones

    def check(self) -> None:
        """Raise Dropped if this write is no longer wanted."""
        if self.dropped:
            raise Dropped

    def chunks(self) -> Iterator[Bytes]:
        """Yield the contents of the file. Raises Dropped if the write is no longer wanted."""
        for chunk in self.buffer.chunks():
            self.check()
            yield chunk


class Target(Protocol):
    """Carries out the steps of a checkpoint, again after an OSError."""

    compares: bool  # whether `agree` comes before a commit

    def agree(self, pending: PendingWrite) -> bool: ...
    def write_file(self, pending: PendingWrite, number: int) -> tuple[str, FileDigest]: ...
    def commit(self, pending: PendingWrite, attempt: int) -> Manifest | None: ...
    def finish(self, pending: PendingWrite, manifest: Manifest) -> Event: ...


class Writer:
    """Writes one checkpoint at a time, and keeps only the newest waiting."""

    def __init__(self) -> None:
        self.committed = 0  # the newest step that this process knows to be committed
        self.refused = ""  # why storage refuses, if it does
        self.differs = False  # from other ranks, a state that was to be written in this attempt
        self._attempt = 0
        self._skip: frozenset[int] = frozenset()
        self._num_files = 0
        self._buffers = (StagingBuffer(), StagingBuffer())
        self._changed = threading.Condition()
        self._waiting: PendingWrite | None = None
        self._under_way: PendingWrite | None = None
        self._news: deque[Event] = deque()
        self._error: BaseException | None = None
        self._told_s = -_TELL_EVERY_S
        self._is_running = False  # whether the thread runs, which holds the buffers and ends without work

    @property
    def busy(self) -> bool:
        return self._waiting is not None or self._under_way is not None

    def holds(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is not committed yet."""
        with self._changed:
            return any(pending is not None and pending.step == step for pending in (self._waiting, self._under_way))

    def begin_attempt(self, attempt: int, skip: frozenset[int], commits_alone: bool) -> None:
        """Continue in another attempt, which leaves out the steps in `skip`."""
        # A write that needs the other ranks of its attempt, or that these have not compared, can never be committed. A
        # state that may contain the update of a step left out since then is useless.
        under_way, waiting = self._under_way, self._waiting
        if not commits_alone or skip != self._skip or (under_way is not None and not under_way.agreed):
            self.drop()
        elif waiting is not None and not waiting.agreed:
            self._waiting = None
        self.differs = False
        if skip != self._skip:
            self.committed = 0
        self._attempt = attempt
        self._skip = skip

    def reserve(self, shards: Sequence[Shard]) -> None:
        """Allocate memory for each `put` of such shards, on another thread."""

        def make_room() -> None:
            buffers = list(self._buffers)
            if FileLayout.of(shards).device is None:
                # Memory that is not pinned is quick to allocate, and many runs never need a second buffer.
                buffers.pop()
            for buffer in buffers:
                buffer.reserve(shards)

        threading.Thread(target=make_room, daemon=True, name="reserve").start()

    def put(self, step: int, shards: Sequence[Shard], metrics: dict[str, float], target: Target) -> None:
        """Copy the shards, for which training waits, for a later write."""
        began_s = time.monotonic()
        # The state that still waits is given up for this newer one, so two buffers are enough.
        with self._changed:
            self._waiting = None
            buffer = self._buffers[0]
            if self._under_way is not None and self._under_way.buffer is buffer:
                buffer = self._buffers[1]
        buffer.fill(shards)
        with self._changed:
            blocked_s = time.monotonic() - began_s
            self._waiting = PendingWrite(step, metrics, buffer, target, began_s, blocked_s, agreed=not target.compares)
            self._changed.notify_all()
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, daemon=True, name="checkpoints").start()

    def drop(self) -> None:
        """Give up all uncommitted writes."""
        with self._changed:
            # The thread may be writing this state, and looks at the mark before each chunk and before the commit.
            if self._under_way is not None:
                self._under_way.dropped = True
            self._waiting = None
            self._under_way = None
            self.differs = False
            self._changed.notify_all()

    def news(self) -> list[Event]:
        """Return new commits and failures. Raises errors that are not storage's."""
        self._raise()
        # The thread may append meanwhile; its later events come with the next call.
        return [self._news.popleft() for _ in range(len(self._news))]

    def wait(self, alive: Callable[[], None], limit_s: float) -> bool:
        """Wait for all writes; return False after `limit_s`. Raises as `news` does."""
        deadline_s = time.monotonic() + limit_s
        while self.busy and self._error is None and time.monotonic() < deadline_s:
            alive()  # keeps the watchdog from taking the wait for a hang
            with self._changed:
                self._changed.wait(0.02)
        self._raise()
        return not self.busy

    def _raise(self) -> None:
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                pending = self._waiting
                self._waiting = None
                self._under_way = pending
                if pending is None:
                    self._is_running = False
                    self._changed.notify_all()
                    return
            self._write_until_done(pending)

    def _write_until_done(self, pending: PendingWrite) -> None:
        pauses = delays(_FIRST_DELAY_S, _LONGEST_DELAY_S)
        while True:
            try:
                self._write(pending)
                self.refused = ""
                return
            except Dropped:
                return
            except OSError as error:
                self.refused = str(error)
                # Reported at once, and then once a minute. A superseded write was not refused by storage.
                if not isinstance(error, Superseded) and time.monotonic() - self._told_s >= _TELL_EVERY_S:
                    self._told_s = time.monotonic()
                    needed = pending.buffer.num_bytes
                    self._news.append(checkpoint_failed(pending.step, self.refused, needed))
            except BaseException as error:
                # No code joins this thread, so the training thread raises the error, by `news` or `wait`.
                self._error = error
                return
            with self._changed:
                # A newer state or a drop ends the retries. Without this check, a dropped write that storage refuses
                # before reading a chunk would be retried without a pause.
                if self._changed.wait_for(lambda: self._waiting is not None or pending.dropped, next(pauses)):
                    return

    def _write(self, pending: PendingWrite) -> None:
        # First of all, because later the other ranks may be gone.
        pending.agreed = pending.agreed or pending.target.agree(pending)
        if not pending.agreed:
            self.differs = True
            raise Dropped
        # If only the commit was refused, the file of the last try is still valid.
        if pending.file is None:
            self._num_files += 1
            pending.file = pending.target.write_file(pending, self._num_files)
        manifest = pending.target.commit(pending, self._attempt)
        self.committed = pending.step
        if manifest is not None:
            try:
                self._news.append(pending.target.finish(pending, manifest))
            except OSError:
                # The checkpoint was read back and is damaged, so its file must be written again.
                pending.file = None
                raise
