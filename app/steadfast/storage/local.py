"""Store files below a path of a local or shared file system."""

import contextlib
import errno
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path


@dataclass(frozen=True)
class LocalStore:
    """Store below a path.

    Data is on the disk, not only in memory, before a verb returns.
    """

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
        # The file is buffered, because one system call returns at most 2 GiB and an unbuffered file makes only one
        # call.
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
                    # A disk that fills up writes only a part of the data before it refuses the rest.
                    while part:
                        part = part[file.write(part) :]
                os.fsync(file.fileno())
        except BaseException:
            # A part of a file is of no use, and a disk that is full needs its room.
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def commit(self, name: str, data: bytes, private: bool = False) -> None:
        path = self.path / name
        # The name has host and thread, because several processes and threads may commit the same file at once.
        temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}")
        mode = 0o600 if private else 0o666
        self._write(str(temporary.relative_to(self.path)), [data], mode)
        try:
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_tree(path.parent, deep=False)

    def sync(self, name: str) -> None:
        """Write a file to the disk that any process has written, and its name."""
        sync_tree(self.path / name)
        sync_tree((self.path / name).parent, deep=False)

    def delete(self, name: str) -> None:
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def num_bytes(self, folder: str) -> int:
        total = 0
        for place, _, files in os.walk(self.path / folder):
            for file in files:
                # A running command may have deleted the file meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(place, file)).st_size
        return total


def _open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    """Open a regular file.

    Raises OSError for a link, which may lead out of the store, and for a pipe, which may block.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "the file is a link, which is not followed", path) from None
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def span(file_bytes: int, start: int, num_bytes: int | None) -> tuple[int, int]:
    """Return the first byte and the length of a read.

    The arguments are those of `Store.read`, with the file's size `file_bytes`.
    """
    if start < 0:
        start += file_bytes
    first = min(max(0, start), file_bytes)
    length = file_bytes - first
    if num_bytes is not None:
        length = min(length, num_bytes)
    return first, length


def _make_folder(path: Path) -> None:
    # `mkdir(parents=True)` would not sync the folders that it creates on the way.
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_tree(path.parent, deep=False)


def sync_tree(path: Path, deep: bool = True) -> None:
    """Write a file or a folder to the disk; without `deep` only the folder's names."""
    # The fsync of a file does not write its name to the disk, so the file could be missing after a loss of power.
    if deep and path.is_dir():
        for inner in path.iterdir():
            sync_tree(inner)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
