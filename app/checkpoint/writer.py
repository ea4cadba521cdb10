"""Brings states to storage while training goes on: a thread of the worker process, which outlives attempts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.checkpoint.manifest import FileDigest
from app.checkpoint.shards import Piece, Staged
from app.runtime import Event

_TELL_EVERY_S = 60.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 30.0  # between two tries


class Dropped(Exception):
    """What was to be written is not wanted any more."""


class Superseded(OSError):
    """Another attempt has begun. That is worth another try: perhaps this process is a part of it, and is only late."""


@dataclass(eq=False)
class Job:
    """
    Args:
        write: writes and commits what has been staged, and returns the event that tells of it. Now and then it calls
            `check`.
        blocked_s: how long training has waited.
        files: what of it is on storage already, for another try.
    """

    step: int
    staged: Staged
    began_s: float
    blocked_s: float
    write: Callable[[Job], Event | None]
    files: dict[str, FileDigest] = field(default_factory=dict)
    dropped: bool = False

    def check(self) -> None:
        if self.dropped:
            raise Dropped


class Writer:
    """Writes one state at a time; of those that come meanwhile, the newest waits. What storage refuses is tried again,
    and told at once and then once a minute.

    attempt, skip: of the world that this process is in. num_files: begun to be written so far. committed: the
    newest step that this process knows to be on storage. refused: why storage last refused, if it does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.attempt, self.skip = 0, frozenset[int]()
        self.num_files = self.committed = 0
        self.refused = ""
        self._clock = clock
        self._buffers = (Staged(), Staged())
        self._changed = threading.Condition()
        self._waiting: Job | None = None
        self._under_way: Job | None = None
        self._news: deque[Event] = deque()
        self._error: BaseException | None = None
        self._told_s = -_TELL_EVERY_S
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._waiting is not None or self._under_way is not None

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """For the first `put` of such pieces, on a thread of its own."""
        threading.Thread(target=self._buffers[0].reserve, args=(pieces,), daemon=True, name="prepare").start()

    def put(self, step: int, pieces: Sequence[Piece], write: Callable[[Job], Event | None]) -> None:
        """Copies the pieces, which is what training waits for, and leaves the rest to the thread."""
        began = self._clock()
        with self._changed:
            self._waiting = None
            used = self._under_way.staged if self._under_way else None
        staged = self._buffers[self._buffers[0] is used]
        staged.fill(pieces)
        with self._changed:
            self._waiting = Job(step, staged, began, self._clock() - began, write)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name="checkpoints")
            self._thread.start()

    def drop(self) -> None:
        """Whatever is not committed yet: another attempt has begun, in which nobody would commit it."""
        with self._changed:
            if self._under_way:
                self._under_way.dropped = True
            self._waiting = self._under_way = None
            self._changed.notify_all()

    def news(self) -> list[Event]:
        """What has come of jobs since the last call: commits, and what storage refuses. Raises what a job raised,
        unless storage did."""
        self._raise()
        return [self._news.popleft() for _ in range(len(self._news))]

    def wait(self, alive: Callable[[], None], limit_s: float) -> bool:
        """Until nothing is left to write; False if that is not so after `limit_s`. Raises as `news` does.

        Args:
            alive: called all the time, for whoever watches: that storage takes long is no hang.
        """
        until = self._clock() + limit_s
        while self.busy and self._error is None and self._clock() < until:
            alive()
            with self._changed:
                self._changed.wait(0.02)
        self._raise()
        return not self.busy

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                job, self._waiting = self._waiting, None
                self._under_way = job
            if job is not None:
                self._bring(job)
            with self._changed:
                if self._under_way is job:
                    self._under_way = None
                self._changed.notify_all()

    def _bring(self, job: Job) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                news = job.write(job)
                self.refused = ""
                if news:
                    self._news.append(news)
                return
            except Dropped:
                return
            except OSError as error:
                self.refused = str(error)
                if not isinstance(error, Superseded):
                    self._tell_of_refusal(job)
            except BaseException as error:
                self._error = error
                return
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or job.dropped, delay_s)
                if self._waiting is not None:  # newer, so this one is not worth another try
                    return
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    def _tell_of_refusal(self, job: Job) -> None:
        if self._clock() - self._told_s >= _TELL_EVERY_S:
            self._told_s = self._clock()
            self._news.append(failure(job.step, self.refused, job.staged.num_bytes))


def failure(step: int, error: str, needed_bytes: int) -> Event:
    """A checkpoint is not on storage; it is tried again, or the next one is."""
    return {"event": "checkpoint_failed", "step": step, "error": error, "needed_bytes": needed_bytes}
