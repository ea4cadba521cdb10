"""Read the tensors of a checkpoint whole, whatever world wrote them, and load exported weights into a model."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from app.checkpoint.catalog import Catalog, Damaged
from app.checkpoint.shards import whole_tensors
from app.errors import StorageError, UsageError


def read_whole(catalog: Catalog, step: int, part: str = "model") -> dict[str, Tensor]:
    """Verify a checkpoint and return one part of its state, unsharded, by the plain model's own names.

    Raises UsageError if there is no checkpoint of this step, and StorageError if it is damaged.
    """
    try:
        manifest = catalog.manifest(step)
        if manifest is None:
            raise UsageError(f"{catalog.store.uri} holds no checkpoint of step {step}")
        catalog.verify(manifest)
    except Damaged as error:
        raise StorageError(f"step {step} is damaged: {error}. Choose another by --step") from error
    return whole_tensors(catalog.readers(manifest), part)


def load_exported(model: nn.Module, path: Path) -> None:
    """Load the weights of an exported file into `model`. Raises UsageError if they are missing, or another model's."""
    try:
        if path.suffix == ".safetensors":
            weights = safetensors.torch.load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(weights)
    # The file is the user's and may hold anything. Each of these is how a reader, or the model, refuses it.
    except (OSError, RuntimeError, SafetensorError, ValueError, UnpicklingError, EOFError, TypeError) as error:
        raise UsageError(f"run.init_from: {path} cannot be loaded into this model: {error}") from error
