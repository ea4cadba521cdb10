"""Read and write small JSON files atomically."""

import errno
import json
import math
from typing import Any

from steadfast.storage import Store, join

_MOST_BYTES = 2**24  # far more than any document of a run has


def write_json(store: Store, name: str, value: dict[str, Any]) -> None:
    """Replace a file by a JSON object."""
    store.commit(name, json.dumps(value, indent=2).encode() + b"\n")


def read_document(store: Store, name: str) -> bytes:
    """Return the contents of a small file.

    Raises OSError as `Store.read` does, and if the file is too large for a document.
    """
    data = store.read(name, 0, _MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"the file has more than {_MOST_BYTES >> 20} MiB", join(store.uri, name))
    return data


def json_line(value: Any) -> str:
    """Return JSON in one line, with null for NaN and infinities."""
    # Python would write NaN, which is no JSON and which other programs refuse.
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


def read_json(store: Store, name: str) -> dict[str, Any] | None:
    """Return the object in a file, None if the file is missing or invalid."""
    try:
        value = json.loads(read_document(store, name))
    except (OSError, ValueError, RecursionError):
        return None
    # Other values were not written by this program.
    if not isinstance(value, dict):
        return None
    return value
