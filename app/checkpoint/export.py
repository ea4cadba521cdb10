"""What a checkpoint holds, whole, for those who need neither its world nor this program; and the way back."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from app.checkpoint.catalog import Catalog, Damaged, path_of
from app.checkpoint.shards import whole_tensors
from app.errors import StorageError, UsageError

_SUFFIXES = (".safetensors", ".pt")


def export(catalog: Catalog, step: int | None, out: Path) -> str:
    """Writes the model's weights to a file that plain PyTorch loads. Returns the line to print.

    Args:
        step: by default the newest checkpoint's.
        out: `.safetensors`, or `.pt` for `torch.load(..., weights_only=True)`.

    Raises:
        UsageError: there is no such checkpoint, or the file's name ends otherwise.
        StorageError: the checkpoint is damaged, or the file cannot be written.
    """
    if out.suffix not in _SUFFIXES:
        raise UsageError(f"--out {out}: must end in {' or '.join(_SUFFIXES)}")
    if step is None:
        step = catalog.newest()  # also where it is damaged: to take an older one is for the user to say
    if step is None:
        raise UsageError(f"{catalog.store.uri} holds no checkpoint")
    weights = read_whole(catalog, step)
    temporary = out.with_name(f".{out.name}.partial")
    try:
        if out.suffix == ".pt":
            torch.save(weights, temporary)
        else:
            safetensors.torch.save_file(weights, temporary, {"format": "pt"})
        temporary.replace(out)
    except (OSError, RuntimeError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{out} cannot be written: {error}") from error
    return f"{out}: {len(weights)} tensors of step {step} of {catalog.store.uri}"


def load_exported(model: nn.Module, path: Path) -> None:
    """Starts `model` from an exported file.

    Raises:
        UsageError: there is no such file, or it holds another model's weights.
    """
    try:
        if path.suffix == ".safetensors":
            weights = safetensors.torch.load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(weights)
    except (OSError, RuntimeError, SafetensorError, ValueError, UnpicklingError, EOFError, TypeError) as error:
        raise UsageError(f"run.init_from: {path} cannot be loaded into this model: {error}") from error


def read_whole(catalog: Catalog, step: int, part: str = "model") -> dict[str, Tensor]:
    """The tensors of a part of the state, unsharded, by the plain model's own names; after all files were verified.

    Raises:
        UsageError: there is no such checkpoint.
        StorageError: it is damaged.
    """
    try:
        manifest = catalog.manifest(step)
        if manifest is None:
            raise UsageError(f"{catalog.store.uri} holds no checkpoint of step {step}")
        catalog.verify(manifest)
    except Damaged as error:
        raise StorageError(f"step {step} is damaged: {error}. Choose another by --step") from error
    return whole_tensors(catalog.store, [f"{path_of(step)}/{name}" for name in manifest.files], part)
