"""Append lines of JSON to a stream: the ledger, the events."""

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
_UPLOAD_INTERVAL_S = 2.0  # so much of a stream is lost with a machine
_BLOCK_BYTES = 2**22  # read at once, of a stream of any length
_LONGEST_LINE_BYTES = 2**24  # what goes on for longer without a line's end is the hole of a disk, or not of our writing
_LARGEST_S = 2.5e11  # the year 9891: later ones no calendar can show


class FileStream:
    """A stream in a file of a disk."""

    def __init__(self, path: Path) -> None:
        # Unbuffered and for appending: what is written is in the file whatever happens to this process next.
        self._file = path.open("ab", buffering=0)
        # A line that the last writer left unfinished is ended first, or it would spoil the next one as well.
        last_byte = LocalStore(path.parent).read(path.name, -1)
        self._backlog = b"" if last_byte in (b"", b"\n") else b"\n"

    def write(self, lines: Iterable[Line]) -> None:
        self._backlog += _encode(lines)
        # A disk that is full may take a part of a line; the rest has to go before anything else.
        with contextlib.suppress(OSError):
            while self._backlog:
                num_written = self._file.write(self._backlog)
                self._backlog = self._backlog[num_written:]

    def close(self) -> None:
        self.write([])
        self._file.close()


class SegmentStream:
    """A stream in a bucket: a folder of segments in the order of their names, uploaded by a thread."""

    # A bucket cannot append to an object. So the last segment is uploaded anew, a little longer each time, until it is
    # so long that this becomes costly.
    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        # The names of segments begin with this time, so those of a later writer come after those of this one.
        self._began_ns = time.time_ns()
        self._number = 0
        self._segment = b""
        self._num_stored = 0  # so many bytes of the segment are in the bucket
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._upload_until_closed, daemon=True, name=name)
        self._thread.start()

    def write(self, lines: Iterable[Line]) -> None:
        with self._lock:
            self._segment += _encode(lines)

    def close(self) -> None:
        """Return once all lines are in the bucket, or the bucket has refused them once more."""
        self._closing.set()
        self._thread.join()

    def _upload_until_closed(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(_UPLOAD_INTERVAL_S)
            with contextlib.suppress(OSError):
                self._upload(self._segment)

    def _upload(self, segment: bytes) -> None:
        if len(segment) == self._num_stored:
            return
        self._store.commit(f"{self._name}/{self._began_ns:020d}-{self._number:06d}", segment)
        self._num_stored = len(segment)
        if len(segment) > _SEGMENT_BYTES:
            with self._lock:
                # Lines may have been added while this segment was on its way: they begin the next one.
                self._segment = self._segment[len(segment) :]
            self._number += 1
            self._num_stored = 0


Stream = FileStream | SegmentStream


def open_stream(store: Store, name: str) -> Stream:
    """Open a stream for its only writer. Lines that storage refuses are kept, and go before the next ones."""
    # A disk that is full raises nothing here: training does not end for want of room to tell of it.
    if isinstance(store, LocalStore):
        return FileStream(store.path / name)
    return SegmentStream(store, name)


def read_lines(store: Store, name: str) -> Iterator[Line]:
    """Yield every whole line of a stream. Lines that a kill or a full disk cut short are left out."""
    for block in read_blocks(store, name):
        yield from decode(block)


def read_blocks(store: Store, name: str) -> Iterator[bytes]:
    """Yield a stream piece by piece, each ending where a line does. What is left of a line at its end is left out."""
    for part in _parts(store, name):
        start = 0
        rest = b""
        too_long = False  # the line that `data` begins within
        with contextlib.suppress(FileNotFoundError):
            while data := store.read(part, start, _BLOCK_BYTES):
                start += len(data)
                if too_long:
                    _, end, data = data.partition(b"\n")
                    too_long = not end
                whole, end, rest = (rest + data).rpartition(b"\n")
                if whole:
                    yield whole + end
                if len(rest) > _LONGEST_LINE_BYTES:
                    rest, too_long = b"", True


def is_number(value: Any) -> bool:
    """Return whether a value is a number that 64 bits can hold; it may be NaN."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def is_count(value: Any) -> bool:
    """Return whether a value can be a number of steps or of bytes."""
    return type(value) is int and 0 <= value < 2**53


def is_moment(value: Any) -> bool:
    """Return whether a value can be a Unix time, or a duration, in seconds or milliseconds."""
    return is_number(value) and abs(value) < _LARGEST_S  # which NaN is not


def first_lines(store: Store, name: str, num_bytes: int = 2**14) -> list[Line]:
    """Return the whole lines among the first `num_bytes` bytes of a stream, or of its first segment."""
    with contextlib.suppress(FileNotFoundError):
        return decode(store.read(_parts(store, name)[0], 0, num_bytes))
    return []


def last_lines(store: Store, name: str, num_bytes: int = 2**17) -> list[Line]:
    """Return the whole lines among the last `num_bytes` bytes of a stream."""
    data = b""
    for part in reversed(_parts(store, name)):
        with contextlib.suppress(FileNotFoundError):
            data = store.read(part, len(data) - num_bytes) + data
        if len(data) >= num_bytes:
            # The first line may have begun before these bytes.
            _, _, data = data.partition(b"\n")
            break
    return decode(data)


def _parts(store: Store, name: str) -> list[str]:
    segments = store.list(name)
    if not segments:
        return [name]
    return [f"{name}/{segment}" for segment in segments]


def _encode(lines: Iterable[Line]) -> bytes:
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def decode(data: bytes) -> list[Line]:
    """Return the whole lines in a part of a stream that are objects."""
    found = []
    # What follows the last line end is a line that is still being written, or was cut short.
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):  # or it is no line of ours
                found.append(value)
    return found
