"""Store the files of a run on a disk or in a bucket.

Six verbs are the protocol of every store.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from steadfast.storage.local import LocalStore

Bytes = bytes | memoryview
Read = Callable[[int, int], bytes]  # reads a file: from this byte on, this number of bytes

__all__ = ["Bytes", "LocalStore", "Read", "Store", "arrow_filesystem", "join", "open_store"]


class Store(Protocol):
    """Folder on a disk or in a bucket.

    Names are relative to the folder, with parts joined by slashes. Stores can be pickled.

    Raises (from every verb):
        FileNotFoundError: there is no such file.
        OSError: storage cannot carry out the verb now.
    """

    @property
    def uri(self) -> str:
        """Path or URI that the user gave for the store."""
        ...

    def list(self, folder: str) -> list[str]:
        """Return the sorted names in `folder`, an empty list without such a folder."""
        ...

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return the bytes of a file from `start` on.

        At most `num_bytes` bytes are returned, by default all. A negative `start` counts from the end.
        """
        ...

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a file part by part, durable on return.

        Until the return, readers may see some of the parts. After an error no file is left.
        """
        ...

    def commit(self, name: str, data: bytes, private: bool = False) -> None:
        """Replace a file atomically.

        A reader finds either the old content or the new content, even after a crash.

        Args:
            private: on a disk, only this user may read the file. A bucket has its own access rules, and ignores this.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its contents, if present.

        A link is deleted, and what it leads to is kept.
        """
        ...

    def num_bytes(self, folder: str) -> int:
        """Return the size of all files in a folder and in the folders below, 0 without such a folder.

        Links are not followed.
        """
        ...


def open_store(location: str) -> Store:
    """Return the store at a path or a URI.

    Raises ValueError for credentials or unknown options in the URI.
    """
    if "://" not in location:
        return LocalStore(Path(location))
    # Importing pyarrow takes half a second, which a run on a disk does not need.
    from steadfast.storage.arrow import ArrowStore

    return ArrowStore(location)


def join(location: str, name: str) -> str:
    """Return the path or URI of `name` below `location`.

    The query of a URI stays at the end.
    """
    if "://" not in location:
        return f"{location.rstrip('/')}/{name}"
    place, mark, query = location.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{query}"


def arrow_filesystem(store: Store) -> tuple[Any, str]:
    """Return pyarrow's file system and path of a store.

    The file system is None for a local store.
    """
    if isinstance(store, LocalStore):
        return None, store.uri
    from steadfast.storage.arrow import connect

    return connect(store.uri)
