"""What makes a folder a checkpoint: a list of its files with their digests, written last, and itself signed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from app.errors import StorageError

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
        ValueError: it is damaged.
        StorageError: another version of this program has written it.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        signature = content.pop("sha256", None)
        version, signed = content["version"], signature == _digest(content)
        if version == VERSION and signed:
            files = {name: FileDigest(**digest) for name, digest in content.pop("files").items()}
            return Manifest(files=files, **content)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError("manifest.json is damaged") from None
    if version != VERSION and (signed or signature is None):  # version 1 was not signed
        raise StorageError(
            f"its manifest is of version {version}, and this program reads version {VERSION}. Go on with the release "
            "that wrote it, or choose another run.name"
        )
    raise ValueError("manifest.json is damaged: its digest is another")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
