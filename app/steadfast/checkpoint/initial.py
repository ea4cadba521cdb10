"""Build the initial model, and load any weights from a file.

Such a file is written by `export`, by Hugging Face's `save_pretrained` or by `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from steadfast.config import Config, RunConfig
from steadfast.data.randomness import seed_host
from steadfast.errors import UsageError
from steadfast.models import build_model
from steadfast.parallel.dtensor import sharded_like
from steadfast.parallel.stages import held_elsewhere
from steadfast.run.directory import runs_root

if TYPE_CHECKING:
    from steadfast.parallel.deferred import InitialValues

# Files in a folder of Hugging Face, in order of preference; an index lists the files of a large model.
_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"
# Entries in which trainers keep the weights beside other things; the first is Lightning's.
_ENTRIES = ("state_dict", "model_state_dict", "model")
_LFS = b"version https://git-lfs"  # beginning of a file that Git LFS has not fetched
METADATA = ".metadata"  # in a folder of torch.distributed.checkpoint
# The user's file may hold anything. A reader, or the model, refuses the file with one of these errors.
_REFUSALS = (
    OSError,
    RuntimeError,
    SafetensorError,
    ValueError,
    LookupError,
    UnpicklingError,
    EOFError,
    TypeError,
    AttributeError,
    MemoryError,
    OverflowError,
    RecursionError,
)


class Loaded(NamedTuple):
    """Names that did not fit; a strict load has none."""

    missing: tuple[str, ...] = ()  # in the model but not in the file; these keep their initial values
    unexpected: tuple[str, ...] = ()  # in the file but not in the model


def build_initial(config: Config) -> tuple[nn.Module, Loaded]:
    """Build the initial model of a run, the same on every rank.

    Weights from a file are read here only if checkpoints leave them out; `load_initial` reads them otherwise.
    """
    _seed(config.run.seed)
    model = build_model(config.model)
    loaded = Loaded()
    if config.checkpoint.trainable_only:
        loaded = load_initial(model, config.run)
    return model, loaded


def build_initial_sharded(config: Config) -> tuple[nn.Module, InitialValues]:
    """Build the initial model without memory for its parameters.

    `InitialValues.fill` computes the values of this rank's shards.

    Raises:
        NotDeferrable: the model cannot be built without memory.
    """
    from steadfast.parallel.deferred import build_without_memory  # the import takes a second, only for sharded models

    _seed(config.run.seed)
    return build_without_memory(partial(build_model, config.model))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)  # seeds the generators of accelerators too
    seed_host(seed)


def load_initial(model: nn.Module, run: RunConfig) -> Loaded:
    """Load the configured starting weights. Raises UsageError as `load_weights` does."""
    if run.init_from is None:
        return Loaded()
    return load_weights(model, runs_root() / run.init_from, run.init_strict)


def load_weights(model: nn.Module, path: Path, strict: bool = True) -> Loaded:
    """Load the weights at `path`, a file or a folder, into `model`.

    If the model is sharded, this rank loads its own shards.

    Raises:
        UsageError: the weights cannot be read or belong to another model; or, if not strict, no name fits.
    """
    remedy = ""
    try:
        weights = _without_prefix(_weights_at(path), model)
        if strict:
            remedy = ". With run.init_strict=false what fits is loaded, and the rest is named"
        _tie(model, weights)
        for name, held in model.state_dict().items():
            if name in weights:
                weights[name] = sharded_like(held, weights[name])
            elif strict and not isinstance(held, Tensor):  # an empty extra state, which no file of tensors has
                weights[name] = held
        for name in held_elsewhere(model):
            weights.pop(name, None)
        missing, unexpected = model.load_state_dict(weights, strict=strict)
        # Without this check a load that is not strict would train random weights if all names have another prefix.
        if len(unexpected) == len(weights):
            raise ValueError(f"none of its names is the model's; it has {', '.join(unexpected[:3])} ...")
    except _REFUSALS as error:
        raise UsageError(f"run.init_from: {path} cannot be loaded into this model: {error}{remedy}") from error
    return Loaded(tuple(missing), tuple(unexpected))


def _weights_at(path: Path) -> dict[str, Tensor]:
    if (path / METADATA).is_file():
        from steadfast.checkpoint.dcp import read_dcp

        return read_dcp(path)
    weights: dict[str, Tensor] = {}
    for file in _files_of(path):
        weights |= _read(file)
    return weights


def _files_of(path: Path) -> list[Path]:
    """Return the files to read at a path.

    A folder may have an index that lists several files.
    """
    if not path.is_dir():
        return [path]
    for name in _FILES:
        if (path / name).is_file():
            return [path / name]
        index = path / (name + _INDEX)
        if index.is_file():
            # The index maps each tensor to its file, so most files occur many times.
            files = set(json.loads(index.read_text())["weight_map"].values())
            return [inside(path, file) for file in sorted(files)]
    raise ValueError(f"the folder holds neither {' nor '.join(_FILES)}, nor an index of one, nor {METADATA}")


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file that a folder's index names.

    Raises ValueError if the name leads out of the folder.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"its index names {name}, which is outside of the folder")
    if (folder / name).exists() and not (folder / name).is_file():
        raise ValueError(f"{name} is no file")
    return folder / name


def _read(file: Path) -> dict[str, Tensor]:
    with file.open("rb") as opened:
        head = opened.read(len(_LFS))
    if head == _LFS or not head:
        raise ValueError(f"{file.name} is {'only a pointer: run git lfs pull' if head else 'empty'}")
    if file.suffix == ".safetensors":
        return safetensors.torch.load_file(file)
    # Without `weights_only` a pickle could run any code. The file may name a GPU that this machine does not have.
    try:
        weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        # torch's own advice is to load the file without `weights_only`.
        if other := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(f"it holds a {other[1]}; save the model's state_dict alone") from error
        raise ValueError("it is no file of torch.save") from error
    if not isinstance(weights, dict):
        raise ValueError(f"it holds a {type(weights).__name__}, not a state_dict")
    for entry in _ENTRIES:
        inner = weights.get(entry)
        if isinstance(inner, dict):
            weights = inner
            break
    for name, tensor in weights.items():
        is_tensor = isinstance(tensor, Tensor) or str(name).endswith("_extra_state")  # a module's own data
        if not (isinstance(name, str) and is_tensor):
            raise ValueError(f"it is no state_dict: {name!r} names a {type(tensor).__name__}, not a tensor")
    return weights


def _without_prefix(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the weights without the name of a module around the model, if there is one.

    A LightningModule holds the model as an attribute. DDP and compiled modules hold it too.
    """
    wanted = model.state_dict().keys()
    if wanted & weights.keys():
        return weights
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        prefix, _, rest = name.partition(".")
        parts.setdefault(prefix, {})[rest] = tensor
    fitting = {prefix: len(wanted & part.keys()) for prefix, part in parts.items()}
    most = max(fitting.values(), default=0)
    best = [prefix for prefix, count in fitting.items() if count == most]
    if not most:
        return weights
    if len(best) > 1:
        raise ValueError(f"its parts {', '.join(best)} fit equally well; write the part to use into a file of its own")
    return parts[best[0]]


def _tie(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Add the missing names of shared parameters.

    Hugging Face writes each parameter under one name only.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(param, []).append(name)
    for names in names_of.values():
        found = [name for name in names if name in weights]
        if found:
            weights |= dict.fromkeys(set(names) - weights.keys(), weights[found[0]])
