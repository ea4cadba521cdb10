"""Leave files where run directories will lie, and look there for those of other nodes."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from app.storage import LocalStore, Store

_SEEN_S = 10.0  # for which a shared file system may keep an old listing
_POLL_S = 0.2
_NUM_TRIES = 5
_CONTENT = b"left by doctor, which deletes it\n"  # not empty: a full disk, or a quota, takes an empty file


@dataclass(frozen=True)
class Marks:
    """A folder of files, one from each node, that is there for as long as `doctor` looks at storage.

    It lies in run.storage. Of a path that is not there yet it lies in the deepest folder that is: a run would make the
    others, and `doctor` leaves nothing behind.
    """

    store: Store  # of run.storage
    folder: str

    def leave(self, name: str) -> str:
        """Write the file of a node. Return what storage says against it, empty if nothing."""
        place = _place(self.store)
        try:
            place.commit(f"{self.folder}/{name}", _CONTENT)
        except OSError as error:
            why = error.strerror or str(error)
            return why if place == self.store else f"{why} (in {place.uri}, the last folder of this path that is there)"
        return ""

    def seen(self) -> set[str]:
        """Return whose files are seen from here."""
        with suppress(OSError):
            return set(_place(self.store).list(self.folder))
        return set()

    def wait_for(self, names: set[str]) -> set[str]:
        """Return whose files are seen from here, once all of some nodes are or this has waited long enough."""
        until_s = time.monotonic() + _SEEN_S
        seen = self.seen()
        while time.monotonic() < until_s and not names <= seen:
            time.sleep(_POLL_S)
            seen = self.seen()
        return seen

    def remove(self) -> None:
        """Delete the folder with all files, while other nodes do the same."""
        for _ in range(_NUM_TRIES):
            try:
                _place(self.store).delete(self.folder)
                return
            except OSError:  # what it was about to delete, another node has deleted
                time.sleep(_POLL_S)


def _place(store: Store) -> Store:
    if not isinstance(store, LocalStore):
        return store
    path = store.path
    # Not `is_dir`: a file in the way, or a link to a mount that is not there, is where a run would fail.
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return LocalStore(Path(path))
