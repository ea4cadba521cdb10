"""`index --config FILE --out FOLDER`: write the samples of a stream into shards of Parquet, once."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any

from steadfast.commands.options import add_config_arguments, read_config, run_on_cluster
from steadfast.config import Config, Target
from steadfast.errors import DataError, UsageError
from steadfast.run.directory import runs_root
from steadfast.storage.local import sync_tree
from steadfast.units import printable


def add_arguments(parser: ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--out", metavar="FOLDER", help="folder to write, which must not exist")


def run(options: Namespace) -> int:
    """Write the shards, and print the section `data` for the configuration."""
    from steadfast.data.write_shards import write_shards

    config = read_config(options)
    if options.out is None:
        raise UsageError("--out FOLDER is missing, for example --out shards")
    if options.cluster:
        return run_on_cluster(options)
    if "://" in options.out:
        raise UsageError(
            f"--out {options.out}: must be a folder of this machine; copy the shards to a bucket afterwards"
        )
    out = runs_root() / options.out
    if out.exists():
        raise UsageError(f"--out {out}: already exists; choose another folder, or delete this one to write it anew")
    partial = out.with_name(f"{out.name}.partial")
    count = write_shards(open_stream(config), partial)
    partial.rename(out)
    sync_tree(out.parent, deep=False)
    print(printable(f"{out}: {count:,} samples. To train on them:\n  data: {{kind: parquet, path: {options.out}}}"))
    return 0


def open_stream(config: Config) -> Iterable[Any]:
    """Return the stream that `data.target` names.

    Raises DataError if the target is no stream.
    """
    import torch

    from steadfast.config.target import build_target
    from steadfast.data.randomness import seed_host

    if not isinstance(config.data, Target):
        raise UsageError(f"index reads a stream of data.target, not data.kind={config.data.kind}")
    torch.manual_seed(config.run.seed)
    seed_host(config.run.seed)
    stream = build_target(config.data, "data")
    if hasattr(stream, "iter_rows"):  # a ray.data.Dataset
        # Otherwise a resume would find other samples than those that were written.
        stream.context.execution_options.preserve_order = True
        rows: Iterable[Any] = stream.iter_rows()
        return rows
    if not hasattr(stream, "__iter__"):
        raise DataError(f"{config.data.target} returned a {type(stream).__name__}, which cannot be iterated over")
    found: Iterable[Any] = stream
    return found
