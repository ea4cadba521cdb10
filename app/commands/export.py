"""`export RUN --out FILE`: write the weights of a checkpoint for plain PyTorch, or for Hugging Face's libraries."""

import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError

from app.checkpoint.catalog import Catalog, path_of
from app.commands.options import add_run_argument, add_trust_argument, check_trusted, run_on_cluster, take_storage
from app.config import Config
from app.errors import StorageError, UsageError
from app.run.directory import RunDirectory, base, find_run, reading
from app.units import printable

_FORMATS = ("safetensors", "pt", "hf")


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--out", metavar="FILE", help="what to write, .safetensors or .pt; a folder for hf")
    parser.add_argument("--format", choices=_FORMATS, help="by default what --out ends in; hf is for from_pretrained")
    parser.add_argument("--raw", action="store_true", help="the weights themselves, where a hook averages them")
    parser.add_argument("--step", type=int, metavar="N", help="of which checkpoint; by default the newest")
    add_trust_argument(parser)


def run(options: Namespace) -> int:
    """Write the file or folder, and print what is in it."""
    take_storage(options)
    if len(options.runs) != 1 or options.out is None:
        raise UsageError("export takes one run and --out, for example: export ddp --out model.safetensors")
    if options.cluster:
        return run_on_cluster(options)
    directory = find_run(options.runs[0], options.storage)
    # Relative to the folder from which run.init_from is read.
    out = base() / options.out
    kind = options.format or out.suffix.removeprefix(".")
    if kind not in _FORMATS:
        raise UsageError(f"--out {out}: must end in .safetensors or .pt, unless there is --format {'|'.join(_FORMATS)}")
    # The newest even if it turns out to be damaged: whether an older one will do is for the user to say.
    with reading(directory):
        step = Catalog(directory.store).newest() if options.step is None else options.step
        if step is None:
            raise UsageError(f"{directory.uri} holds no checkpoint")
        if kind == "hf":
            what = _export_model(directory, _trusted_config(options, directory), step, out, options.raw)
        else:
            what = _export_weights(directory, step, out, kind, options.raw)
    print(printable(f"{out}: {what} of step {step} of {directory.uri}"))
    return 0


def _trusted_config(options: Namespace, directory: RunDirectory) -> Config:
    """Return the configuration of a run whose model may be built. Raises UsageError."""
    config = directory.stored_config()
    if config is None:
        raise UsageError(f"{directory.uri} has no config.yaml, which says how to build the model")
    check_trusted(options, config, ["model.target"])
    return config


def _export_weights(directory: RunDirectory, step: int, out: Path, kind: str, raw: bool) -> str:
    """Write the tensors of a checkpoint by the names that the model gives them. Return what they are."""
    import safetensors.torch
    import torch

    from app.checkpoint.shards import whole_tensors
    from app.checkpoint.weights import AVERAGES, verified

    catalog = Catalog(directory.store)
    manifest = verified(catalog, step)
    weights = whole_tensors(catalog.readers(manifest), "model")
    averages = {} if raw else whole_tensors(catalog.readers(manifest), AVERAGES)
    weights |= averages
    if kind == "pt":
        _write(out, lambda path: torch.save(weights, path))
    else:
        _write(out, lambda path: safetensors.torch.save_file(weights, path, {"format": "pt"}))
    lacks = ", without the frozen parameters, which the checkpoint leaves out," if manifest.base else ""
    return f"{len(weights)} tensors{_averaged(averages)}{lacks}"


def _export_model(directory: RunDirectory, config: Config, step: int, out: Path, raw: bool) -> str:
    """Write what the model's own `save_pretrained` makes of a checkpoint. Return the model's class."""
    import torch

    from app.checkpoint.initial import build_initial
    from app.checkpoint.shards import load_shards, shards_of, whole_tensors
    from app.checkpoint.state import ModelState, base_sha256
    from app.checkpoint.weights import AVERAGES, verified
    from app.parallel.precision import build_precision

    if out.exists():
        raise UsageError(f"--out {out}: is there already")
    model, _ = build_initial(config)
    save: Callable[[Path], object] | None = getattr(model, "save_pretrained", None)
    if save is None:
        raise UsageError(f"--format hf: {type(model).__name__} has no save_pretrained; take safetensors or pt")
    catalog = Catalog(directory.store)
    manifest = verified(catalog, step)
    manifest.check_base(base_sha256(model) if manifest.base else "", directory / path_of(step))
    # In the formats of the run, so that what is written computes what the run's model did.
    model = build_precision(config.precision, torch.device("cpu")).convert(model)
    state = {"model": ModelState(model, config.checkpoint.trainable_only).state_dict()}
    load_shards(catalog.readers(manifest), shards_of(state), "model.")
    averages = {} if raw else whole_tensors(catalog.readers(manifest), AVERAGES)
    model.load_state_dict(averages, strict=False)
    _write(out, save)
    return f"a {type(model).__name__}{_averaged(averages)}"


def _averaged(averages: Mapping[str, object]) -> str:
    return ", averaged," if averages else ""


def _write(out: Path, write: Callable[[Path], object]) -> None:
    """Have a file or folder written beside `out`, and rename it."""
    # A full disk then neither leaves half of it nor destroys the former one.
    temporary = out.with_name(f".{out.name}.partial")
    try:
        write(temporary)
        temporary.replace(out)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise StorageError(f"{out} cannot be written: {error}") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)
