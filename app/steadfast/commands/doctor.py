"""`doctor [RUN]`: check machines before a run, or a run's checkpoints.

Each finding is printed as a line, with the remedy below it.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from steadfast.checkpoint.catalog import Catalog, Damaged
from steadfast.checkpoint.manifest import Manifest
from steadfast.commands.options import add_run_argument, is_of_config, run_on_cluster, take_storage
from steadfast.config import Config, load_config, parse_config
from steadfast.errors import StorageError, UsageError
from steadfast.run.directory import find_run, reading
from steadfast.units import in_words, joined, plural, printable, size

if TYPE_CHECKING:
    from steadfast.doctor.findings import Finding

_STARTING = "checking the machines; this takes about half a minute"


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [RUN | [--config FILE] [key=value ...]] [options]"
    add_run_argument(parser)
    parser.add_argument("-c", "--config", metavar="FILE", help="check cluster and storage of this configuration")
    as_json = "print all findings or checkpoints as one JSON document, and progress on stderr"
    parser.add_argument("--json", action="store_true", help=as_json)


def run(options: Namespace) -> int:
    """Print a line for each finding, or for each checkpoint of a run.

    Return the exit code: 1 if a finding is an error or a checkpoint is damaged.
    """
    # A word that is no override is the name of a run, whose checkpoints are to be verified.
    if options.config is None and not all(is_of_config(word) for word in options.runs):
        return _check_run(options)
    overrides = list(options.runs)
    if options.storage:
        overrides.append(f"run.storage={options.storage}")
    # The configuration is read before the command goes to a cluster, so that mistakes in it are reported at once.
    config = load_config(options.config, overrides) if options.config else parse_config("", overrides=overrides)
    if options.cluster:
        return run_on_cluster(options)
    return _check_machines(config, options)


def _check_machines(config: Config, options: Namespace) -> int:
    tell = _teller(options.json)
    tell(_STARTING)
    # This imports torch and Ray, which takes seconds, so the line above is printed first.
    from steadfast.doctor.machines import check_machines

    findings = []
    for finding in check_machines(config, options.verbose):
        findings.append(finding)
        tell(_told(finding))
    tell(_counted(findings))
    if options.json:
        print(json.dumps({"findings": list(map(asdict, findings))}, indent=2))
    # A warning must not fail a script: the run would work, only slower or with less protection.
    return int(any(finding.level == "error" for finding in findings))


def _teller(as_json: bool) -> Callable[[str], None]:
    """Return a function that prints a line of progress.

    With --json the lines go to stderr, because stdout is for the document.
    """
    if as_json and sys.stdout.isatty():
        # On a terminal both streams arrive as one, so progress would be mixed into the document. The head of
        # `--cluster` prints to a terminal too.
        return lambda line: None
    stream = sys.stderr if as_json else sys.stdout
    # The check takes half a minute, and into a pipe Python would print its lines all at once.
    return partial(print, file=stream, flush=True)


def _told(finding: "Finding") -> str:
    line = f"{finding.level:<8} {finding.check}: {finding.what}"
    if finding.remedy:
        line += f"\n{'':<8} -> {finding.remedy}"
    return line


def _counted(findings: "Iterable[Finding]") -> str:
    levels = [finding.level for finding in findings]
    return f"{plural(levels.count('error'), 'error')}, {plural(levels.count('warning'), 'warning')}"


def _check_run(options: Namespace) -> int:
    take_storage(options)
    if len(options.runs) > 1:
        raise UsageError("doctor takes one run, for example: doctor ddp")
    if options.cluster:
        return run_on_cluster(options)
    tell = _teller(options.json)
    found = []
    directory = find_run(options.runs[0], options.storage)
    with reading(directory):
        for checkpoint in examine(Catalog(directory.store)):
            found.append(checkpoint)
            tell(printable(f"step {checkpoint.step}: {checkpoint.what}"))
    if options.json:
        print(json.dumps({"run": directory.uri, "checkpoints": list(map(asdict, found))}, indent=2))
    # An unfinished checkpoint is no fault: a run is writing the checkpoint, or ended while writing. No run resumes
    # from it.
    return int(any(checkpoint.state not in ("good", "unfinished") for checkpoint in found))


@dataclass(frozen=True)
class Examined:
    """Checkpoint of a run with its state."""

    step: int
    state: Literal["good", "unfinished", "damaged", "unreadable", "quarantined"]
    what: str  # state with size, date or error, in words


def examine(catalog: Catalog) -> Iterator[Examined]:
    """Verify each checkpoint, newest first; then yield quarantined checkpoints."""
    for step in catalog.steps():
        try:
            manifest = catalog.manifest(step)
            if manifest is None:
                yield Examined(step, "unfinished", "unfinished, never committed")
                continue
            began = time.monotonic()
            catalog.verify(manifest)
            seconds = time.monotonic() - began
            yield Examined(step, "good", f"good | {_describe(manifest)} | read in {seconds:.1f} s")
        except Damaged as error:
            # If the run is in progress, it may have deleted this checkpoint meanwhile, which looks like damage.
            if step in catalog.steps():
                yield Examined(step, "damaged", f"damaged: {error}")
        except (StorageError, OSError) as error:
            yield Examined(step, "unreadable", str(error))
    for step, why in sorted(catalog.quarantined().items(), reverse=True):
        yield Examined(step, "quarantined", f"quarantined: {why}")


def _describe(manifest: Manifest) -> str:
    committed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time_s))
    files = f"{size(manifest.num_bytes)} in {plural(len(manifest.files), 'file')} of {manifest.world_size} workers"
    return joined([f"{files}, {committed}, attempt {manifest.attempt}", in_words(manifest.metrics)])
