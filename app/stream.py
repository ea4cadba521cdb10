"""Lines that are only ever added to: the ledger, the events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from app.files import ends_whole


class Stream:
    """Has one writer. What the disk refuses (it is full, say) is kept, and goes before the next lines: training does
    not end for want of room to tell of it. A line that the last writer left unfinished stays one by itself."""

    def __init__(self, path: Path) -> None:
        # Unbuffered and for appending: what is written is in the file whatever happens to this process next.
        self._file = path.open("ab", buffering=0)
        self._backlog = b"" if ends_whole(path) else b"\n"

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        self._backlog += b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        try:
            while self._backlog:
                self._backlog = self._backlog[self._file.write(self._backlog) :]
        except OSError:
            pass

    def close(self) -> None:
        self.write([])
        self._file.close()
