"""Small files that are never seen half-written."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replaces `path` whole: a reader, or a crash, finds the old content or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None when there is none, or none that can be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def append_line(path: Path, value: dict[str, Any]) -> None:
    """One line in one write, so a stream that several processes may append to never mixes lines."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(value, separators=(",", ":")).encode() + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; what a kill or a full disk cut short is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            yield from _parsed(line)


def last_lines(path: Path, num_bytes: int = 2**17) -> list[dict[str, Any]]:
    """The whole lines of a stream among its last bytes."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        cut = file.tell() > 0
        lines = file.read().splitlines(keepends=True)
    return [value for line in lines[cut:] for value in _parsed(line)]


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a stream, without reading what comes before it."""
    return next(reversed(last_lines(path, 16384)), None)


def ends_whole(path: Path) -> bool:
    """Whether a stream may be added to as it is."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read() in (b"", b"\n")


def _parsed(line: bytes) -> Iterator[dict[str, Any]]:
    if line.endswith(b"\n"):
        with contextlib.suppress(ValueError):
            yield json.loads(line)
