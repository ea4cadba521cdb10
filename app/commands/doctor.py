"""`doctor RUN`: read every checkpoint of a run, and compare it with what was written."""

import time
from argparse import Namespace
from collections.abc import Iterator

from app.checkpoint.catalog import Catalog, Damaged
from app.checkpoint.manifest import Manifest
from app.commands.options import add_run_argument, run_on_cluster
from app.errors import StorageError, UsageError
from app.run.directory import find_run
from app.units import number, plural, size

add_arguments = add_run_argument


def run(options: Namespace) -> int:
    """Print a line for each checkpoint. Return 1 if a run may not resume from one of them."""
    if len(options.runs) != 1:
        raise UsageError("doctor takes one run, for example: doctor ddp")
    if options.cluster:
        return run_on_cluster(options)
    exit_code = 0
    for line, good in examine(Catalog(find_run(options.runs[0]).store)):
        # Flushed, since reading a checkpoint takes a while and a pipe would hold its line back.
        print(line, flush=True)
        if not good:
            exit_code = 1
    return exit_code


def examine(catalog: Catalog) -> Iterator[tuple[str, bool]]:
    """Read all files of each checkpoint, newest first. Yield its line, and whether the run may resume from it."""
    for step in catalog.steps():
        try:
            manifest = catalog.manifest(step)
            if manifest is None:
                # Not a fault: a run is writing it, or ended while it did, and no run will resume from it.
                yield f"step {step}: unfinished, never committed", True
                continue
            began = time.monotonic()
            catalog.verify(manifest)
            yield f"step {step}: good | {_describe(manifest)} | read in {time.monotonic() - began:.1f} s", True
        except Damaged as error:
            # Unless the run, which may be under way, has deleted this checkpoint meanwhile.
            if step in catalog.steps():
                yield f"step {step}: damaged: {error}", False
        except (StorageError, OSError) as error:
            yield f"step {step}: {error}", False
    for step, why in sorted(catalog.quarantined().items(), reverse=True):
        yield f"step {step}: quarantined: {why}", False


def _describe(manifest: Manifest) -> str:
    committed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time_s))
    files = f"{size(manifest.num_bytes)} in {plural(len(manifest.files), 'file')} of {manifest.world_size} workers"
    metrics = [f"{name} {number(value)}" for name, value in manifest.metrics.items()]
    return " | ".join([f"{files}, {committed}, attempt {manifest.attempt}", *metrics])
