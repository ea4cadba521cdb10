"""Folder of a run directory for libraries that only write local files."""

import contextlib
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from steadfast.storage import LocalStore, Store

_UPLOAD_EVERY_S = 20.0


class Spool:
    """Local folder whose files are kept in the run directory.

    If the run directory is on a disk, the folder lies in the run directory. If the run directory is in a bucket, the
    folder is temporary, and its files are copied to the bucket.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._uploaded_s = time.monotonic()
        self._uploaded: dict[Path, tuple[int, int]] = {}  # by file: its bytes and its modification time when uploaded
        self._temporary: TemporaryDirectory[str] | None = None
        self.path = Path(store.uri) / folder
        if not isinstance(store, LocalStore):
            self._temporary = TemporaryDirectory(prefix=folder)
            self.path = Path(self._temporary.name)

    @property
    def due(self) -> bool:
        """Return whether the files should be copied now."""
        return self._temporary is not None and time.monotonic() - self._uploaded_s > _UPLOAD_EVERY_S

    def upload(self) -> None:
        """Copy changed files to the bucket, if there is one."""
        self._uploaded_s = time.monotonic()
        if self._temporary is None:
            return
        for path in self.path.rglob("*"):
            # The target of a link is copied by itself, or lies outside of the folder.
            if path.is_symlink() or not path.is_file():
                continue
            with contextlib.suppress(FileNotFoundError):  # the library may delete its files at any time
                # A file that grows after this line is copied again later, because the noted size is the earlier one.
                found = path.stat()
                now = found.st_size, found.st_mtime_ns
                if self._uploaded.get(path) != now:
                    self._store.commit(f"{self._folder}/{path.relative_to(self.path)}", path.read_bytes())
                    self._uploaded[path] = now

    def close(self) -> None:
        """Copy changed files a last time, and delete the temporary folder."""
        self.upload()
        if self._temporary is not None:
            self._temporary.cleanup()
