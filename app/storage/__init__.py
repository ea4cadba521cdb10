"""Where a run's files lie, behind a few verbs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from app.storage.local import LocalStore

Bytes = bytes | memoryview

__all__ = ["Bytes", "LocalStore", "Store", "arrow_filesystem", "join", "open_store"]


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
        """So many bytes from `start` on, or fewer where the file ends sooner; by default all of it. A negative start
        counts from the end."""
        ...

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Whoever reads meanwhile, or after a crash, may find a part of it; once this returns, all of it stays. When it
        raises, nothing does."""
        ...

    def commit(self, name: str, data: bytes) -> None:
        """Replaces the file whole: a reader, or a crash, finds the old content or the new."""
        ...

    def delete(self, name: str) -> None:
        """A file, or a folder with all that is in it; also where there is none."""
        ...


def open_store(location: str) -> Store:
    """Of a path, or of a URI such as `s3://bucket/prefix`. Nothing is looked up on storage yet.

    Raises:
        ValueError: the URI has credentials or unknown options in it.
    """
    if "://" not in location:
        return LocalStore(Path(location))
    from app.storage.arrow import ArrowStore  # takes half a second, which a run on a disk does not need

    return ArrowStore(location)


def join(location: str, name: str) -> str:
    """`name` below a path or URI, whose query stays where it belongs."""
    place, mark, query = location.partition("?") if "://" in location else (location, "", "")
    return f"{place.rstrip('/')}/{name}{mark}{query}"


def arrow_filesystem(store: Store) -> tuple[Any, str]:
    """For others that write there: a pyarrow file system, None for the local one, and the path of the store in it."""
    if isinstance(store, LocalStore):
        return None, store.uri
    from app.storage.arrow import connect

    return connect(store.uri)
