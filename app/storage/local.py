"""Files below a path, on this machine or on a file system that the nodes share."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LocalStore:
    """What is written is on the disk, not only in memory, before a verb returns."""

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
        with (self.path / name).open("rb") as file:  # unbuffered it would give two gigabytes at most
            file.seek(max(0, start + os.fstat(file.fileno()).st_size) if start < 0 else start)
            return file.read(-1 if num_bytes is None else num_bytes)

    def write(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        path = self.path / name
        _make_folder(path.parent)
        try:
            with path.open("wb", buffering=0) as file:
                for part in parts:
                    while part:
                        part = part[file.write(part) :]  # a disk that fills up takes a part of it first
                os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def commit(self, name: str, data: bytes) -> None:
        path = self.path / name
        temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}")
        self.write(str(temporary.relative_to(self.path)), [data])
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


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Or a new name in it would not survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
