"""Store files below a path, on this machine or on a file system that the nodes share."""

import contextlib
import errno
import os
import shutil
import socket
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path


@dataclass(frozen=True)
class LocalStore:
    """A store below a path. What is written is on the disk, not only in memory, before a verb returns."""

    path: Path

    @property
    def uri(self) -> str:
        return str(self.path)

    def list(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        # Buffered: one system call returns 2 GiB at most, and an unbuffered file makes only one.
        with open(self.path / name, "rb", opener=_open_regular) as file:
            first, length = span(os.fstat(file.fileno()).st_size, start, num_bytes)
            file.seek(first)
            return file.read(length)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        self._write(name, parts)

    def _write(self, name: str, parts: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
        path = self.path / name
        _make_folder(path.parent)
        try:
            with open(path, "wb", buffering=0, opener=partial(_open_regular, mode=mode)) as file:
                for part in parts:
                    # A disk that fills up takes a part of it before it refuses.
                    while part:
                        part = part[file.write(part) :]
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def commit(self, name: str, data: bytes, private: bool = False) -> None:
        path = self.path / name
        # Host and process are in the name because several of them may commit the same file at once.
        temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
        self._write(str(temporary.relative_to(self.path)), [data], 0o600 if private else 0o666)
        try:
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)

    def delete(self, name: str) -> None:
        path = self.path / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file. Raises OSError for a link, which may lead out of the store, or a pipe, which may block."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", path) from None
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def span(file_bytes: int, start: int, num_bytes: int | None) -> tuple[int, int]:
    """Return the first byte and the length of what `Store.read` returns of a file of `file_bytes`."""
    if start < 0:
        start += file_bytes
    first = min(max(0, start), file_bytes)
    length = file_bytes - first
    if num_bytes is not None:
        length = min(length, num_bytes)
    return first, length


def _make_folder(path: Path) -> None:
    # Not by `mkdir(parents=True)`: each folder on the way has to be synced as well.
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    # A file's own fsync does not bring its name to the disk: after a loss of power the file would be gone.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
