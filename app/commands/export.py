"""`export RUN --out FILE`: write the weights of a checkpoint to a file that plain PyTorch loads."""

from argparse import ArgumentParser, Namespace

from app.checkpoint.catalog import Catalog
from app.commands.options import add_run_argument, run_on_cluster
from app.errors import StorageError, UsageError
from app.run.directory import base, find_run


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--out", metavar="FILE", help="what to write, .safetensors or .pt")
    parser.add_argument("--step", type=int, metavar="N", help="of which checkpoint; by default the newest")


def run(options: Namespace) -> int:
    """Write the file, and print what is in it."""
    if len(options.runs) != 1 or options.out is None:
        raise UsageError("export takes one run and --out, for example: export ddp --out model.safetensors")
    if options.cluster:
        return run_on_cluster(options)
    catalog = Catalog(find_run(options.runs[0]).store)
    # Relative to the folder from which run.init_from is read.
    out = base() / options.out
    if out.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"--out {out}: must end in .safetensors or .pt")
    # The newest even if it turns out to be damaged: whether an older one will do is for the user to say.
    step = catalog.newest() if options.step is None else options.step
    if step is None:
        raise UsageError(f"{catalog.store.uri} holds no checkpoint")

    import safetensors.torch
    import torch

    from app.checkpoint.weights import read_whole

    weights = read_whole(catalog, step)
    # Written beside it and renamed: a full disk neither leaves half a file nor destroys the former one.
    temporary = out.with_name(f".{out.name}.partial")
    try:
        if out.suffix == ".pt":
            torch.save(weights, temporary)
        else:
            safetensors.torch.save_file(weights, temporary, {"format": "pt"})
        temporary.replace(out)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{out} cannot be written: {error}") from error
    print(f"{out}: {len(weights)} tensors of step {step} of {catalog.store.uri}")
    return 0
