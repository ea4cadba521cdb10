"""What a checkpoint holds, whole, for those who need neither its world nor this program."""

from __future__ import annotations

from torch import Tensor

from app.checkpoint.catalog import Catalog, Damaged, path_of
from app.checkpoint.shards import whole_tensors
from app.errors import StorageError


def read_whole(catalog: Catalog, step: int, part: str = "model") -> dict[str, Tensor]:
    """The tensors of a part of the state, unsharded, by the plain model's own names; after all files were verified.

    Raises:
        StorageError: there is no such checkpoint, or it is damaged.
    """
    try:
        manifest = catalog.manifest(step)
        if manifest is None:
            raise StorageError(f"{catalog.store.uri} holds no checkpoint of step {step}")
        catalog.verify(manifest)
    except Damaged as error:
        raise StorageError(f"step {step} is damaged: {error}. Choose another one") from error
    return whole_tensors(catalog.store, [f"{path_of(step)}/{name}" for name in manifest.files], part)
