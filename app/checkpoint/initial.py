"""Load the weights that a run starts from: a file of `export`, or what Hugging Face's `save_pretrained` writes."""

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from app.errors import UsageError

# Of a folder of Hugging Face's, in the order of preference; an index names the files that a large model is spread over.
_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"


class Loaded(NamedTuple):
    """Names that did not fit. Of a strict load there are none."""

    missing: tuple[str, ...] = ()  # in the model, and left as they were initialised
    unexpected: tuple[str, ...] = ()  # in the file, and not used


def load_initial(model: nn.Module, path: Path, strict: bool = True) -> Loaded:
    """Load the weights at `path`, a file or a folder, into `model`.

    Raises:
        UsageError: they cannot be read or are another model's; or, if not strict, none of them is the model's.
    """
    try:
        weights: dict[str, Tensor] = {}
        for file in _files_of(path):
            weights |= _read(file)
        _tie(model, weights)
        missing, unexpected = model.load_state_dict(weights, strict=strict)
        if len(unexpected) == len(weights):
            raise ValueError(f"none of its names is the model's; it has {', '.join(unexpected[:3])} ...")
    # The file is the user's and may hold anything. Each of these is how a reader, or the model, refuses it.
    except (OSError, RuntimeError, SafetensorError, ValueError, UnpicklingError, EOFError, TypeError) as error:
        remedy = "" if not strict else ". With run.init_strict=false what fits is loaded, and the rest is named"
        raise UsageError(f"run.init_from: {path} cannot be loaded into this model: {error}{remedy}") from error
    return Loaded(tuple(missing), tuple(unexpected))


def _files_of(path: Path) -> list[Path]:
    """Return the files to read: one, or all that the index of a folder names."""
    if not path.is_dir():
        return [path]
    for name in _FILES:
        if (path / name).is_file():
            return [path / name]
        index = path / (name + _INDEX)
        if index.is_file():
            return [path / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    raise ValueError(f"the folder holds neither {' nor '.join(_FILES)}, nor an index of one")


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return safetensors.torch.load_file(file)
    weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return weights


def _tie(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Add the names that share a parameter with one that is there: Hugging Face writes each parameter once."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(param, []).append(name)
    for names in names_of.values():
        found = [name for name in names if name in weights]
        if found:
            weights |= dict.fromkeys(set(names) - weights.keys(), weights[found[0]])
