"""`doctor [RUN]`: check the machines before a run; or read every checkpoint of a run, and compare it.

A finding is a line, and below it what to do.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from app.checkpoint.catalog import Catalog, Damaged
from app.checkpoint.manifest import Manifest
from app.commands.options import add_run_argument, is_of_config, run_on_cluster, take_storage
from app.config import Config, load_config, parse_config
from app.errors import StorageError, UsageError
from app.run.directory import find_run, reading
from app.units import number, plural, printable, size

if TYPE_CHECKING:
    from app.checkup.findings import Finding

_STARTING = "looking at the machines; this takes about half a minute"


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [RUN | [--config FILE] [key=value ...]] [options]"
    add_run_argument(parser)
    parser.add_argument("-c", "--config", metavar="FILE", help="check the machines for it: its cluster, its storage")
    as_json = "findings about machines as one JSON document; progress goes to stderr"
    parser.add_argument("--json", action="store_true", help=as_json)


def run(options: Namespace) -> int:
    """Print a line for each finding, or for each checkpoint of a run. Return 1 if one of them is bad."""
    if options.config is None and not all(is_of_config(word) for word in options.runs):
        return _check_run(options)
    overrides = [*options.runs, f"run.storage={options.storage}"] if options.storage else options.runs
    config = load_config(options.config, overrides) if options.config else parse_config("", overrides=overrides)
    return run_on_cluster(options) if options.cluster else _check_machines(config, options)


def _check_machines(config: Config, options: Namespace) -> int:
    tell = _teller(options.json)
    tell(_STARTING)
    # Not before it is said what takes so long: with it come torch and Ray.
    from app.launch.checkup import check_machines

    findings = []
    for finding in check_machines(config, options.verbose):
        findings.append(finding)
        tell(_told(finding))
    tell(_counted(findings))
    if options.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    return int(any(finding.level == "error" for finding in findings))


def _teller(as_json: bool) -> Callable[[str], None]:
    """Return what shows a line: on the standard output, beside a JSON document on the standard error."""
    if as_json and sys.stdout.isatty():
        # A terminal has one stream for both, and so has the one by which `--cluster` reads what the head prints.
        return lambda line: None
    stream = sys.stderr if as_json else sys.stdout
    return lambda line: print(line, file=stream, flush=True)


def _told(finding: "Finding") -> str:
    line = f"{finding.level:<8} {finding.check}: {finding.what}"
    return f"{line}\n{'':<8} -> {finding.remedy}" if finding.remedy else line


def _counted(findings: "Iterable[Finding]") -> str:
    levels = [finding.level for finding in findings]
    return f"{plural(levels.count('error'), 'error')}, {plural(levels.count('warning'), 'warning')}"


def _check_run(options: Namespace) -> int:
    take_storage(options)
    if len(options.runs) > 1:
        raise UsageError("doctor takes one run, for example: doctor ddp")
    if options.cluster:
        return run_on_cluster(options)
    exit_code = 0
    directory = find_run(options.runs[0], options.storage)
    with reading(directory):
        for line, good in examine(Catalog(directory.store)):
            # Flushed, since reading a checkpoint takes a while and a pipe would hold its line back.
            print(printable(line), flush=True)
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
