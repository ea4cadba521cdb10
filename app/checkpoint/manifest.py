"""What makes a folder a checkpoint: a list of its files with their digests, written last, and itself signed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

VERSION = 2


@dataclass(frozen=True)
class FileDigest:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """
    Args:
        time_s: when it was committed, Unix time.
        dataset: fingerprint.
        files: by name.
        skipped: the steps up to this one that were left out.
        metrics: of the last validation before it.
    """

    step: int
    attempt: int
    world_size: int
    time_s: float
    dataset: str
    files: dict[str, FileDigest]
    skipped: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    version: int = VERSION

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def dump(self) -> bytes:
        content = asdict(self)
        return json.dumps({**content, "sha256": _digest(content)}, indent=2).encode() + b"\n"


def parse_manifest(data: bytes) -> Manifest:
    """
    Raises:
        ValueError: it is damaged, or another version of this program has written it; the message says which.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        version = content.get("version")
        if version == VERSION and content.pop("sha256") == _digest(content):
            files = {name: FileDigest(**digest) for name, digest in content.pop("files").items()}
            return Manifest(files=files, **content)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError("manifest.json is damaged") from None
    if isinstance(version, int) and version != VERSION:
        raise ValueError(f"manifest.json is of version {version}, this program reads {VERSION}")
    raise ValueError("manifest.json is damaged: its digest is another")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
