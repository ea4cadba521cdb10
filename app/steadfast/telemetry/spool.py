"""Folder of a run directory for libraries that only write local files."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from steadfast.storage import LocalStore, Store
from steadfast.storage.documents import read_json

_UPLOAD_EVERY_S = 20.0
_DRAWN = "drawn.json"

Figures = dict[str, float]  # by tag, such as "train/loss"


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
        self._drawn: dict[str, int] | None = None  # last drawn step of each group of figures, once it is read
        self._temporary: TemporaryDirectory[str] | None = None
        self.path = Path(store.uri) / folder
        if not isinstance(store, LocalStore):
            self._temporary = TemporaryDirectory(prefix="steadfast-")
            self.path = Path(self._temporary.name)

    def upload_if_due(self) -> None:
        """Copy changed files to the bucket from time to time."""
        if time.monotonic() - self._uploaded_s > _UPLOAD_EVERY_S:
            self.upload()

    def upload(self) -> None:
        """Copy changed files to the bucket, if there is one."""
        self._uploaded_s = time.monotonic()
        if self._temporary is None:
            return
        # The note of what is drawn comes last, because a kill must not leave it ahead of the figures.
        for path in sorted(self.path.rglob("*"), key=lambda path: path.name == _DRAWN):
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

    def make_up(self, step: int, figures: Figures, draw: Callable[[int, Figures], object]) -> None:
        """Draw figures if no attempt has noted that those of this step and group are drawn."""
        if step > self._noted().get(_group(figures), -1):
            draw(step, figures)

    def note(self, step: int, figures: Figures) -> None:
        """Note for later attempts that figures are drawn."""
        self._noted()[_group(figures)] = step
        self.path.mkdir(parents=True, exist_ok=True)
        new = self.path / f"{_DRAWN}.new"
        new.write_text(json.dumps(self._noted()))
        new.replace(self.path / _DRAWN)

    def _noted(self) -> dict[str, int]:
        if self._drawn is None:
            self._drawn = read_json(self._store, f"{self._folder}/{_DRAWN}") or {}
        return self._drawn

    def close(self) -> None:
        """Copy changed files a last time, and delete the temporary folder."""
        self.upload()
        if self._temporary is not None:
            self._temporary.cleanup()


def _group(figures: Figures) -> str:
    """Return the group of figures that one call draws, such as "train"."""
    return next(iter(figures), "").partition("/")[0]
