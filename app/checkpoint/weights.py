"""Read the whole tensors of a checkpoint from any world."""

from __future__ import annotations

from torch import Tensor

from app.checkpoint.catalog import Catalog, Damaged
from app.checkpoint.manifest import Manifest
from app.checkpoint.shards import whole_tensors
from app.errors import StorageError, UsageError

AVERAGES = "hooks.Ema.averages"  # part of the state that holds averages of the weights


def read_whole(catalog: Catalog, step: int, part: str = "model") -> dict[str, Tensor]:
    """Verify a checkpoint and return one unsharded part of its state.

    Names are those of the plain model.

    Raises UsageError if there is no checkpoint of this step, and StorageError if it is damaged.
    """
    return whole_tensors(catalog.readers(verified(catalog, step)), part)


def verified(catalog: Catalog, step: int) -> Manifest:
    """Verify a checkpoint and return its manifest. Raises as `read_whole` does."""
    try:
        manifest = catalog.manifest(step)
        if manifest is None:
            raise UsageError(f"{catalog.store.uri} holds no checkpoint of step {step}")
        catalog.verify(manifest)
    except Damaged as error:
        raise StorageError(f"step {step} is damaged: {error}. Choose another by --step") from error
    return manifest
