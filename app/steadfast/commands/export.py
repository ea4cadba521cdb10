"""`export RUN --out FILE`: write a checkpoint's weights for PyTorch or Hugging Face."""

import os
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from steadfast.checkpoint.catalog import Catalog, path_of
from steadfast.commands.options import add_run_argument, add_trust_argument, check_trusted, run_on_cluster, take_storage
from steadfast.config import Config
from steadfast.errors import StorageError, UsageError
from steadfast.run.directory import RunDirectory, find_run, reading, runs_root
from steadfast.storage.local import sync_tree
from steadfast.units import printable

if TYPE_CHECKING:
    from torch import Tensor

    from steadfast.storage import Read

_FORMATS = ("safetensors", "pt", "hf", "dcp")


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--out", metavar="FILE", help="file to write, .safetensors or .pt; with hf or dcp a folder")
    parser.add_argument(
        "--format", choices=_FORMATS, help="default: the ending of --out; hf is for from_pretrained, dcp for torch"
    )
    parser.add_argument("--raw", action="store_true", help="write the last weights instead of a hook's averages")
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint; by default the newest")
    add_trust_argument(parser)


def run(options: Namespace) -> int:
    """Write the file or folder, and print its content."""
    take_storage(options)
    if len(options.runs) != 1 or options.out is None:
        raise UsageError("export takes one run and --out, for example: export ddp --out model.safetensors")
    if options.cluster:
        return run_on_cluster(options)
    directory = find_run(options.runs[0], options.storage)
    # A relative path starts at the same folder as a relative `run.init_from`.
    out = runs_root() / options.out
    kind = options.format or out.suffix.removeprefix(".")
    if kind not in _FORMATS:
        raise UsageError(f"--out {out}: must end in .safetensors or .pt, unless there is --format {'|'.join(_FORMATS)}")
    # The newest checkpoint is taken even if it is damaged, because only the user can accept an older one.
    with reading(directory):
        step = options.step
        if step is None:
            step = Catalog(directory.store).newest()
        if step is None:
            raise UsageError(f"{directory.uri} holds no checkpoint")
        if kind == "hf":
            what = _export_model(directory, _trusted_config(options, directory), step, out, options.raw)
        else:
            what = _export_weights(directory, step, out, kind, options.raw)
    print(printable(f"{out}: {what} of step {step} of {directory.uri}"))
    return 0


def _trusted_config(options: Namespace, directory: RunDirectory) -> Config:
    """Return the configuration of a run whose model may be built.

    Raises:
        UsageError: the run has no configuration, or the command lacks --trust-code.
    """
    config = directory.stored_config()
    if config is None:
        raise UsageError(f"{directory.uri} has no config.yaml, so the model cannot be built")
    check_trusted(options, config.targets(), ["model.target"])
    return config


def _export_weights(directory: RunDirectory, step: int, out: Path, kind: str, raw: bool) -> str:
    """Write a checkpoint's tensors under the model's names. Return a description."""
    import safetensors.torch
    import torch

    from steadfast.checkpoint.dcp import write_dcp
    from steadfast.checkpoint.shards import whole_tensors
    from steadfast.checkpoint.weights import verified

    catalog = Catalog(directory.store)
    manifest = verified(catalog, step)
    weights = whole_tensors(catalog.readers(manifest), "model")
    averages = _averages(catalog.readers(manifest), raw)
    # Averages have the names of the weights that they replace.
    weights |= averages
    if kind == "dcp":
        _refuse_existing(out)
        _write(out, partial(write_dcp, weights))
    elif kind == "pt":
        _write(out, lambda path: torch.save(weights, path))
    else:
        _write(out, lambda path: safetensors.torch.save_file(weights, path, {"format": "pt"}))
    what = f"{len(weights)} tensors{_averaged(averages)}"
    if manifest.base:
        what += ", without the frozen parameters, which the checkpoint leaves out,"
    return what


def _export_model(directory: RunDirectory, config: Config, step: int, out: Path, raw: bool) -> str:
    """Write a checkpoint by the model's own `save_pretrained`. Return a description."""
    import torch

    from steadfast.checkpoint.initial import build_initial
    from steadfast.checkpoint.shards import load_shards, shards_of
    from steadfast.checkpoint.state import ModelState, base_sha256
    from steadfast.checkpoint.weights import verified
    from steadfast.parallel.precision import build_precision

    _refuse_existing(out)
    model, _ = build_initial(config)
    save: Callable[[Path], object] | None = getattr(model, "save_pretrained", None)
    if save is None:
        raise UsageError(f"--format hf: {type(model).__name__} has no save_pretrained; use safetensors or pt")
    catalog = Catalog(directory.store)
    manifest = verified(catalog, step)
    # A checkpoint without frozen parameters needs a model with the same frozen parameters.
    manifest.check_base(base_sha256(model) if manifest.base else "", directory / path_of(step))
    # The parameters get the formats of the run, so that the exported model gives the same outputs.
    model = build_precision(config.precision, torch.device("cpu")).convert(model)
    held = ModelState(model, config.checkpoint.trainable_only)
    load_shards(catalog.readers(manifest), shards_of({"model": held.state_dict()}), "model.")
    held.load_copies()
    averages = _averages(catalog.readers(manifest), raw)
    # Not strict, because there are no averages of frozen parameters, and none at all without the hook.
    model.load_state_dict(averages, strict=False)
    _write(out, save)
    return f"a {type(model).__name__}{_averaged(averages)}"


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise UsageError(f"--out {out}: already exists; choose another folder")


def _averages(files: "Sequence[Read]", raw: bool) -> dict[str, "Tensor"]:
    """Return a hook's averages of the weights.

    There are none with --raw, or if the run had no such hook.
    """
    from steadfast.checkpoint.shards import whole_tensors
    from steadfast.checkpoint.weights import AVERAGES

    if raw:
        return {}
    return whole_tensors(files, AVERAGES)


def _averaged(averages: Mapping[str, object]) -> str:
    return ", averaged," if averages else ""


def _write(out: Path, write: Callable[[Path], object]) -> None:
    """Write a file or folder in a temporary folder next to `out`, and rename it."""
    # So a full disk neither leaves a partial file nor destroys an existing one. The folder also has the temporary files
    # of libraries, and what a killed command has left there is deleted.
    folder = out.with_name(f".{out.name}.partial")
    temporary = folder / out.name
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        write(temporary)
        if temporary.is_file():
            # Safetensors makes a file that only its owner reads. The umask can only be read by setting it.
            os.umask(mask := os.umask(0))
            temporary.chmod(0o666 & ~mask)
        sync_tree(temporary)
        temporary.replace(out)
        sync_tree(out.parent, deep=False)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
