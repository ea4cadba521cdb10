"""Append JSON lines to a stream, such as the ledger or the events."""

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from steadfast.errors import StorageError
from steadfast.storage import LocalStore, Store

Line = dict[str, Any]
_SEGMENT_BYTES = 2**18
_UPLOAD_INTERVAL_S = 2.0  # interval of the uploads, and so the longest time whose lines are lost with a machine
_BLOCK_BYTES = 2**22  # bytes of a stream that are read at once
_LONGEST_LINE_BYTES = 2**24  # A longer line is a hole in a file, or was not written by this program.
_LARGEST_S = 2.5e11  # the year 9891; no calendar shows later times


class FileStream:
    """Stream in a file on a disk.

    Raises StorageError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            # The file is unbuffered, so that written lines are in the file even if this process is killed next.
            self._file = path.open("ab", buffering=0)
            # A line that the last writer left unfinished gets an end first. Otherwise the next line would be spoiled
            # too.
            last_byte = LocalStore(path.parent).read(path.name, -1)
        except OSError as error:
            raise StorageError.cannot_write(path, error) from error
        self._backlog = b"" if last_byte in (b"", b"\n") else b"\n"

    def write(self, lines: Iterable[Line]) -> None:
        self._backlog += _encode(lines)
        # A full disk may take a part of a line. The rest must be written before any other line.
        with contextlib.suppress(OSError):
            while self._backlog:
                num_written = self._file.write(self._backlog)
                self._backlog = self._backlog[num_written:]

    def close(self) -> None:
        self.write([])
        self._file.close()


class SegmentStream:
    """Stream in a bucket: a folder of segments that a thread uploads.

    The order of the segments is the order of their names.
    """

    # A bucket cannot append to an object. So the last segment is uploaded again with more lines each time, until
    # another upload would be costly.
    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        # Segments' names begin with this time, so that a later writer's segments follow this writer's segments.
        self._began_ns = time.time_ns()
        self._number = 0
        self._segment = b""
        self._num_stored = 0  # bytes of the segment that are in the bucket
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._upload_until_closed, daemon=True, name=name)
        self._thread.start()

    def write(self, lines: Iterable[Line]) -> None:
        with self._lock:
            self._segment += _encode(lines)

    def close(self) -> None:
        """Wait until all lines are in the bucket, or the bucket refuses another upload."""
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
                # Lines added during the upload begin the next segment.
                self._segment = self._segment[len(segment) :]
            self._number += 1
            self._num_stored = 0


Stream = FileStream | SegmentStream


def open_stream(store: Store, name: str) -> Stream:
    """Open a stream for its only writer.

    Lines that storage refuses are kept, and written before later lines.
    """
    # A full disk raises no error here, because training must not end for lack of space for a record.
    if isinstance(store, LocalStore):
        return FileStream(store.path / name)
    return SegmentStream(store, name)


def sync(store: Store, name: str) -> None:
    """Write a stream to the disk, so that its lines outlast a loss of power."""
    if isinstance(store, LocalStore):
        with contextlib.suppress(OSError):
            store.sync(name)


def read_lines(store: Store, name: str) -> Iterator[Line]:
    """Yield every whole line of a stream.

    Lines that a kill or a full disk has cut short are left out.
    """
    for block in read_blocks(store, name):
        yield from decode(block)


def read_blocks(store: Store, name: str) -> Iterator[bytes]:
    """Yield a stream in blocks of whole lines.

    An unfinished line at the end is left out.
    """
    for part in _parts(store, name):
        start = 0
        rest = b""
        too_long = False  # whether `data` begins within a line that is too long
        # A stream without a line may have no file yet.
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
    """Return whether a value is a 64-bit number, possibly NaN."""
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def is_count(value: Any) -> bool:
    """Return whether a value is plausible as a number of steps or bytes."""
    return type(value) is int and 0 <= value < 2**53


def is_moment(value: Any) -> bool:
    """Return whether a value is plausible as a Unix time or a duration.

    Any finite number up to the year 9891 is plausible, in seconds. A duration may also be in milliseconds.
    """
    return is_number(value) and abs(value) < _LARGEST_S  # the comparison excludes NaN


def first_lines(store: Store, name: str, num_bytes: int = 2**14) -> list[Line]:
    """Return the whole lines in the first `num_bytes` of a stream.

    In a bucket only the first segment is read.
    """
    with contextlib.suppress(FileNotFoundError):
        return decode(store.read(_parts(store, name)[0], 0, num_bytes))
    return []


def last_lines(store: Store, name: str, num_bytes: int = 2**17) -> list[Line]:
    """Return the whole lines in the last `num_bytes` of a stream.

    If no line is whole there, more bytes are read.
    """
    data = b""
    for part in reversed(_parts(store, name)):
        with contextlib.suppress(FileNotFoundError):
            data = store.read(part, len(data) - num_bytes) + data
        if len(data) >= num_bytes:
            # The first line may have begun before these bytes.
            _, _, data = data.partition(b"\n")
            if num_bytes > _LONGEST_LINE_BYTES:
                break
            return decode(data) or last_lines(store, name, 16 * num_bytes)
    return decode(data)


def _parts(store: Store, name: str) -> list[str]:
    segments = store.list(name)
    if not segments:
        return [name]
    return [f"{name}/{segment}" for segment in segments]


def _encode(lines: Iterable[Line]) -> bytes:
    # The ledger has a line for every step of a run, so spaces are left out.
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)


def decode(data: bytes) -> list[Line]:
    """Return the whole lines of a block that are JSON objects."""
    found = []
    # After the last line end there is a line that is still being written or was cut short.
    for line in data.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            if isinstance(value, dict):  # other values were not written by this program
                found.append(value)
    return found
