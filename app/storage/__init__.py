"""Where a run's files lie, behind a few verbs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from app.storage.local import LocalStore

Bytes = bytes | memoryview

__all__ = ["Bytes", "LocalStore", "Store"]


class Store(Protocol):
    """A folder on a disk or in a bucket. Names are relative to it, their parts joined by slashes. Pickles.

    uri: what the user calls it.

    Raises (from every verb): FileNotFoundError for what is not there, another OSError for what cannot be done now.
    """

    @property
    def uri(self) -> str: ...

    def list(self, folder: str) -> list[str]:
        """The names of what lies directly in `folder`, sorted; none where there is no such folder."""
        ...

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """So many bytes from `start` on, or fewer where the file ends sooner; by default all of it."""
        ...

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Whoever reads meanwhile, or after a crash, may find a part of it; once this returns, all of it stays."""
        ...

    def commit(self, name: str, data: bytes) -> None:
        """Replaces the file whole: a reader, or a crash, finds the old content or the new."""
        ...

    def delete(self, name: str) -> None:
        """A file, or a folder with all that is in it; also where there is none."""
        ...
