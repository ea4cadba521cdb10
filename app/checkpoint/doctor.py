"""`doctor RUN`: whether each checkpoint of a run is what was written."""

from __future__ import annotations

import time
from collections.abc import Iterator

from app.checkpoint.catalog import Catalog, Damaged
from app.checkpoint.manifest import Manifest
from app.errors import StorageError
from app.telemetry.narrate import number, size


def examine(catalog: Catalog) -> Iterator[tuple[str, bool]]:
    """Reads every file of every checkpoint, newest first. Changes nothing.

    Yields:
        A line for each checkpoint as soon as it is known, and whether a run may resume from it.
    """
    for step in catalog.steps():
        try:
            manifest = catalog.manifest(step)
            if manifest is None:
                yield f"step {step}: unfinished, never committed", True
                continue
            began = time.monotonic()
            catalog.verify(manifest)
            yield f"step {step}: good | {_described(manifest)} | read in {time.monotonic() - began:.1f} s", True
        except Damaged as error:
            if step in catalog.steps():  # or the run has deleted it meanwhile
                yield f"step {step}: damaged: {error}", False
        except (StorageError, OSError) as error:
            yield f"step {step}: {error}", False
    for step, why in sorted(catalog.quarantined().items(), reverse=True):
        yield f"step {step}: quarantined: {why}", False


def _described(manifest: Manifest) -> str:
    committed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time_s))
    num_files = len(manifest.files)
    files = f"{size(manifest.num_bytes)} in {num_files} file{'s' * (num_files > 1)} of {manifest.world_size} workers"
    metrics = [f"{name} {number(value)}" for name, value in manifest.metrics.items()]
    return " | ".join([f"{files}, {committed}, attempt {manifest.attempt}", *metrics])
