"""A folder of the run directory, for libraries that write files and know no buckets."""

import contextlib
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from app.storage import LocalStore, Store

_UPLOAD_EVERY_S = 20.0


class Spool:
    """The folder itself where it has a path; else a folder of this machine, whose files are copied to the bucket."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._uploaded_s = time.monotonic()
        self._uploaded: dict[Path, tuple[int, int]] = {}  # by file, as it was then: bytes, time of its last change
        self._temporary: TemporaryDirectory[str] | None = None
        self.path = Path(store.uri) / folder
        if not isinstance(store, LocalStore):
            self._temporary = TemporaryDirectory(prefix=folder)
            self.path = Path(self._temporary.name)

    @property
    def due(self) -> bool:
        """Return whether it is time to copy."""
        return self._temporary is not None and time.monotonic() - self._uploaded_s > _UPLOAD_EVERY_S

    def upload(self) -> None:
        """Copy the files that have changed, where there is a bucket to copy them to."""
        self._uploaded_s = time.monotonic()
        if self._temporary is None:
            return
        for path in self.path.rglob("*"):
            # What a link leads to has its own turn, or is no part of the folder.
            if path.is_symlink() or not path.is_file():
                continue
            with contextlib.suppress(FileNotFoundError):  # its writer has deleted it meanwhile
                found = path.stat()
                now = found.st_size, found.st_mtime_ns
                if self._uploaded.get(path) != now:
                    self._store.commit(f"{self._folder}/{path.relative_to(self.path)}", path.read_bytes())
                    self._uploaded[path] = now

    def close(self) -> None:
        """Copy what there is, and delete it here."""
        self.upload()
        if self._temporary is not None:
            self._temporary.cleanup()
