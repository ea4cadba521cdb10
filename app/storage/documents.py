"""Read and write small JSON files that are never seen half-written."""

import json
from typing import Any

from app.storage import Store


def write_json(store: Store, name: str, value: dict[str, Any]) -> None:
    """Replace a file by an object."""
    store.commit(name, json.dumps(value, indent=2).encode() + b"\n")


def read_json(store: Store, name: str) -> dict[str, Any] | None:
    """Return the object in a file, or None if there is none that can be read."""
    try:
        value = json.loads(store.read(name))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
