"""Keep the files of a run on a disk or in a bucket, behind one protocol of five verbs."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from app.storage.local import LocalStore

Bytes = bytes | memoryview
Read = Callable[[int, int], bytes]  # of a file: from which byte on, and how many

__all__ = ["Bytes", "LocalStore", "Read", "Store", "arrow_filesystem", "join", "open_store"]


class Store(Protocol):
    """A folder on a disk or in a bucket. Names are relative to it, their parts joined by slashes. Stores pickle.

    Raises (from every verb):
        FileNotFoundError: there is no such file.
        OSError: storage cannot do this now.
    """

    @property
    def uri(self) -> str:
        """The path or URI by which the user knows this store."""
        ...

    def list(self, folder: str) -> list[str]:
        """Return the sorted names of what lies directly in `folder`, or nothing where there is no such folder."""
        ...

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """Return up to `num_bytes` bytes, by default all, from `start` on; a negative one counts from the end."""
        ...

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a file part by part, durable on return. Until then a part may be seen; if this raises, none is left."""
        ...

    def commit(self, name: str, data: bytes, private: bool = False) -> None:
        """Replace a file atomically: a reader, or a crash, finds either the old content or the new.

        Args:
            private: on a disk, for this user alone. A bucket has no modes: its own rules say who reads it.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is in it. Nothing happens where there is neither."""
        ...


def open_store(location: str) -> Store:
    """Return the store at a path or a URI. Raises ValueError for credentials or unknown options in the URI."""
    if "://" not in location:
        return LocalStore(Path(location))
    # Importing pyarrow takes half a second, which a run on a disk should not pay.
    from app.storage.arrow import ArrowStore

    return ArrowStore(location)


def join(location: str, name: str) -> str:
    """Return the path or URI of `name` below `location`. The query of a URI stays at its end."""
    if "://" not in location:
        return f"{location.rstrip('/')}/{name}"
    place, mark, query = location.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{query}"


def arrow_filesystem(store: Store) -> tuple[Any, str]:
    """Return what a library that writes by pyarrow needs: a file system, None for the local one, and a path in it."""
    if isinstance(store, LocalStore):
        return None, store.uri
    from app.storage.arrow import connect

    return connect(store.uri)
