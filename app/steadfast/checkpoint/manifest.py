"""Manifest of a checkpoint: a signed list of its files and digests.

The manifest is written last, and makes a folder a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from steadfast.errors import StorageError
from steadfast.storage.jsonl import is_count

VERSION = 2


@dataclass(frozen=True)
class FileDigest:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`."""

    step: int
    attempt: int
    world_size: int
    time_s: float  # Unix time of the commit
    dataset: str  # fingerprint of the dataset
    files: dict[str, FileDigest]  # by name
    skipped: list[int] = field(default_factory=list)  # steps up to this one that the run has left out
    metrics: dict[str, float] = field(default_factory=dict)  # of a validation after this step
    base: str = ""  # sha256 of the frozen parameters, if the checkpoint leaves them out
    ends: list[list[int]] = field(default_factory=list)  # step and position of each end of `Amendments`
    forward_size: int | None = None  # that of `Amendments`
    version: int = VERSION

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def check_base(self, base: str, location: str) -> None:
        """Raise StorageError unless `base` is the sha256 of the frozen parameters."""
        if base != self.base:
            raise StorageError(
                f"{location} was trained on another base than this one: frozen parameters of sha256 "
                f"{self.base[:12] or 'none'}, not {base[:12] or 'none'}. Restore the former ones (model.target, "
                "run.init_from), or choose another run.name"
            )

    def dump(self) -> bytes:
        content = asdict(self)
        for key in ("base", "ends", "forward_size"):
            if not content[key]:
                del content[key]  # earlier releases do not know these keys
        return json.dumps({**content, "sha256": _digest(content)}, indent=2).encode() + b"\n"


def parse_manifest(data: bytes) -> Manifest:
    """Parse the output of `Manifest.dump`.

    Raises ValueError for damage, StorageError for another version.
    """
    # Damaged bytes may still be JSON of any shape, so an error of any access means damage.
    try:
        content: dict[str, Any] = json.loads(data)
        signature = content.pop("sha256", None)
        is_signed = signature == _digest(content)
        version = content["version"]
        if version == VERSION and is_signed:
            files = {name: FileDigest(**digest) for name, digest in content.pop("files").items()}
            return _checked(Manifest(files=files, **content))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError("manifest.json is damaged") from None
    if version != VERSION and (is_signed or signature is None):  # version 1 was not signed
        raise StorageError(
            f"its manifest is of version {version}, and this program reads version {VERSION}. Continue with the "
            "release that wrote it, or choose another run.name"
        )
    raise ValueError("manifest.json is damaged: its digest does not match")


def _checked(manifest: Manifest) -> Manifest:
    """Return the manifest if its values are valid. Raises ValueError otherwise."""
    # The digest does not protect from forgery: a program that can write a manifest can also sign one.
    for name, digest in manifest.files.items():
        # The name must be that of a file in this folder: a reader of the checkpoint must not be led out of it.
        if not re.fullmatch(r"\w[\w.-]*", name) or not isinstance(digest.sha256, str) or not is_count(digest.bytes):
            raise ValueError(name)
    numbers = (manifest.step, manifest.attempt, manifest.world_size, manifest.forward_size or 0, *manifest.skipped)
    are_numbers = all(map(is_count, numbers)) and isinstance(manifest.time_s, int | float)
    are_ends = all(len(end) == 2 and all(map(is_count, end)) for end in manifest.ends)
    if not (are_numbers and are_ends and isinstance(manifest.metrics, dict)):
        raise ValueError("not the contents of a manifest")
    return manifest


def _digest(content: dict[str, Any]) -> str:
    # Sorted, so that the digest depends on the values alone and not on the order of keys in the file.
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
