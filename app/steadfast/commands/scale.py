"""`scale RUN --workers MIN:MAX`: change the worker bounds of a run in progress.

The request is a file in the run directory, which every node sees. So the verb needs neither Ray nor Ray's address or
token.
"""

import re
import time
from argparse import ArgumentParser, Namespace

from steadfast.commands.options import add_run_argument, run_on_cluster, take_storage
from steadfast.errors import RunConflict, UsageError
from steadfast.run.directory import RunDirectory, find_run
from steadfast.run.events import Scale
from steadfast.run.owner import read_owner
from steadfast.units import plural

_ANSWER_S = 20.0
_POLL_S = 0.1


def add_arguments(parser: ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--workers", metavar="MIN:MAX", help="new bounds: 2:8, or 4 for exactly four")


def run(options: Namespace) -> int:
    """Request new bounds, wait for the running command, and print both bounds."""
    take_storage(options)
    if len(options.runs) != 1 or options.workers is None:
        raise UsageError("scale takes one run and --workers, for example: scale ddp --workers 2:8")
    if options.cluster:
        return run_on_cluster(options)
    smallest, largest = _parse_bounds(options.workers)
    directory = find_run(options.runs[0], options.storage)
    _check_useful(directory, smallest, largest)
    owner = read_owner(directory.store)
    if owner is None or owner.gone:
        raise RunConflict(f"{directory.uri} is not running; set scaling.num_workers in the command that starts it")

    until_s = time.monotonic() + _ANSWER_S
    request = directory.request_scale(smallest, largest)
    while time.monotonic() < until_s:
        for event in directory.events(Scale):
            if event.request == request:
                print(f"scaling.num_workers of {directory.uri}: {list(event.before)} -> {list(event.after)}")
                return 0
        time.sleep(_POLL_S)

    # The request is withdrawn, because the user is about to see an error: it must not take effect later.
    directory.withdraw(request)
    raise RunConflict(
        f"{directory.uri} did not answer within {_ANSWER_S:g} s. Under torchrun, stop the run and start it "
        "again with another scaling.num_workers"
    )


def _check_useful(directory: RunDirectory, smallest: int, largest: int) -> None:
    config = directory.stored_config()
    if config is None:
        return
    # With `batch.microbatch_size=auto` only the run itself knows the size in use.
    batch = directory.batch(config.batch)
    most = batch.num_microbatches * config.parallel.ranks_per_sample
    if largest > most:
        raise UsageError(
            f"--workers up to {largest}: a global batch of {directory.uri} is {batch.num_microbatches} microbatches "
            f"(batch.global_size {batch.global_size}, batch.microbatch_size {batch.microbatch_size}), so more workers "
            f"would have no work. Request at most {most}"
        )
    if not config.world_sizes((smallest, largest), batch.num_microbatches):
        raise UsageError(
            f"--workers {smallest}:{largest}: {directory.uri} trains with whole replicas "
            f"({config.parallel.replica_key}), the smallest of {plural(config.parallel.smallest_replica, 'worker')}, "
            "and no number within these bounds makes whole replicas"
        )


def _parse_bounds(workers: str) -> tuple[int, int]:
    matched = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", workers)
    if matched:
        smallest = int(matched[1])
        largest = int(matched[2] or smallest)
        if 1 <= smallest <= largest:
            return smallest, largest
    raise UsageError(f"--workers {workers}: must be MIN:MAX with 1 <= MIN <= MAX, for example 2:8")
