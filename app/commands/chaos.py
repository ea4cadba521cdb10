"""`chaos`: inject every fault into this application, stock Ray Train and torchrun."""

from argparse import ArgumentParser, Namespace

from app.commands.options import add_config_arguments, read_config, run_on_cluster
from app.errors import UsageError


def add_arguments(parser: ArgumentParser) -> None:
    add_config_arguments(parser)
    minutes = "start no fault later than this many minutes (default 4.1); 12 is enough for all faults"
    parser.add_argument("--minutes", type=float, default=4.1, metavar="N", help=minutes)


def run(options: Namespace) -> int:
    """Print the cost of each fault. Return 1 if a claim fails, else 0."""
    # Chaos reads the configuration again with its own overrides. Reading it here reports mistakes at once.
    read_config(options)
    if options.cluster:
        return run_on_cluster(options)
    try:
        # Chaos is a test of the program and no part of a run, so it belongs to the tests, which are not in a wheel.
        from tests.chaos.command import chaos
    except ModuleNotFoundError as error:
        # Any other missing module is an import of chaos itself, in a checkout that lacks a package.
        if error.name not in ("tests", "tests.chaos", "tests.chaos.command"):
            raise
        raise UsageError("chaos needs a checkout of the repository: tests/chaos is not part of a package") from error
    return chaos(options.config, options.words, options.minutes)
