"""Test files in `run.storage`, which show whether nodes share the storage."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from steadfast.storage import LocalStore, Store

_SEEN_S = 10.0  # a shared file system may show an old listing for so many seconds
_POLL_S = 0.2
_NUM_TRIES = 5
_CONTENT = b"left by doctor, which deletes it\n"  # not empty: a full disk or a quota still accepts an empty file


@dataclass(frozen=True)
class Marks:
    """Temporary folder with one file from each node, while `doctor` checks storage.

    The folder is in `run.storage`. If that path does not exist yet, the folder is in the deepest parent that exists,
    because a run would create the missing folders, but `doctor` must leave nothing behind.
    """

    store: Store  # of run.storage
    folder: str

    def leave(self, name: str) -> str:
        """Write the file of node `name`. Return storage's error, "" if there is none."""
        place = _place(self.store)
        try:
            place.commit(f"{self.folder}/{name}", _CONTENT)
        except OSError as error:
            why = error.strerror or str(error)
            if place == self.store:
                return why
            return f"{why} (in {place.uri}, the last folder of this path that exists)"
        return ""

    def seen(self) -> set[str]:
        """Return the nodes whose files are visible on this node."""
        # A node that cannot list the folder sees nothing, which is a finding too.
        with suppress(OSError):
            return set(_place(self.store).list(self.folder))
        return set()

    def wait_for(self, names: set[str]) -> set[str]:
        """Wait for the files of some nodes, and return all visible nodes.

        The wait ends when all `names` are visible, or after ten seconds.
        """
        until_s = time.monotonic() + _SEEN_S
        seen = self.seen()
        while time.monotonic() < until_s and not names <= seen:
            time.sleep(_POLL_S)
            seen = self.seen()
        return seen

    def remove(self) -> None:
        """Delete the folder with all files.

        Other nodes may delete the folder at the same time.
        """
        for _ in range(_NUM_TRIES):
            try:
                _place(self.store).delete(self.folder)
                return
            except OSError:
                # Another node has deleted a file meanwhile.
                time.sleep(_POLL_S)


def _place(store: Store) -> Store:
    if not isinstance(store, LocalStore):
        return store
    path = store.path
    # `lexists` instead of `is_dir`: a run would fail at a file in the way, or at a link to a missing mount, and the
    # check has to fail there too.
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return LocalStore(Path(path))
