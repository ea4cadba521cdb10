"""Lines that are only ever added to: the ledger, the events.

On a disk a stream is a file. A bucket cannot add to what is there: in it a stream is a folder of segments, in the order
of their names.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from app.storage import LocalStore, Store

Line = dict[str, Any]
_SEGMENT_BYTES = 2**18
_EVERY_S = 2.0  # how much of a stream a lost machine takes along


class FileStream:
    """A line that the last writer left unfinished stays one by itself."""

    def __init__(self, path: Path) -> None:
        # Unbuffered and for appending: what is written is in the file whatever happens to this process next.
        self._file = path.open("ab", buffering=0)
        self._backlog = b"" if LocalStore(path.parent).read(path.name, -1) in (b"", b"\n") else b"\n"

    def write(self, lines: Iterable[Line]) -> None:
        self._backlog += _dumped(lines)
        with contextlib.suppress(OSError):
            while self._backlog:
                self._backlog = self._backlog[self._file.write(self._backlog) :]

    def close(self) -> None:
        self.write([])
        self._file.close()


class SegmentStream:
    """A thread brings new lines to the bucket every few seconds. The last segment is written again, a little longer
    each time, until it is long enough."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._segment, self._number, self._num_stored = b"", 0, 0
        self._began_ns, self._lock, self._closing = time.time_ns(), threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._bring, daemon=True, name=name)
        self._thread.start()

    def write(self, lines: Iterable[Line]) -> None:
        with self._lock:
            self._segment += _dumped(lines)

    def close(self) -> None:
        """Returns once all lines are in the bucket, or it has refused them once more."""
        self._closing.set()
        self._thread.join()

    def _bring(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(_EVERY_S)
            segment = self._segment
            if len(segment) == self._num_stored:
                continue
            with contextlib.suppress(OSError):
                self._store.commit(f"{self._name}/{self._began_ns:020d}-{self._number:06d}", segment)
                self._num_stored = len(segment)
                if len(segment) > _SEGMENT_BYTES:
                    with self._lock:
                        self._segment = self._segment[len(segment) :]
                    self._number, self._num_stored = self._number + 1, 0


Stream = FileStream | SegmentStream


def open_stream(store: Store, name: str) -> Stream:
    """For its one writer. What storage refuses (the disk is full, say) is kept, and goes before the next lines:
    training does not end for want of room to tell of it."""
    return FileStream(store.path / name) if isinstance(store, LocalStore) else SegmentStream(store, name)


def read_lines(store: Store, name: str) -> Iterator[Line]:
    """Every whole line; what a kill or a full disk cut short is left out."""
    for part in [f"{name}/{each}" for each in store.list(name)] or [name]:
        with contextlib.suppress(FileNotFoundError):
            yield from _parsed(store.read(part))


def last_lines(store: Store, name: str, num_bytes: int = 2**17) -> list[Line]:
    """The whole lines of a stream among its last bytes."""
    data = b""
    for part in [f"{name}/{each}" for each in reversed(store.list(name))] or [name]:
        with contextlib.suppress(FileNotFoundError):
            data = store.read(part, len(data) - num_bytes) + data
        if len(data) >= num_bytes:
            return _parsed(data.partition(b"\n")[2])
    return _parsed(data)


def _dumped(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def _parsed(data: bytes) -> list[Line]:
    found = []
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found
