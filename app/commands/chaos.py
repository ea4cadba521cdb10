"""`chaos`: prove the claims, by doing every fault to this application, stock Ray Train and torchrun."""

from argparse import ArgumentParser, Namespace

from app.commands.options import add_config_arguments, read_config, run_on_cluster
from app.errors import UsageError


def add_arguments(parser: ArgumentParser) -> None:
    add_config_arguments(parser)
    minutes = "no fault begins later than this (4.1); 12 is enough for all of them"
    parser.add_argument("--minutes", type=float, default=4.1, metavar="N", help=minutes)


def run(options: Namespace) -> int:
    """Print what each fault costs each contender. Return 1 if a claim does not hold."""
    # Chaos reads it again with its own overrides. Here, a mistake is told before the command goes anywhere.
    read_config(options)
    if options.cluster:
        return run_on_cluster(options)
    try:
        # It is a proof and no part of a run, so it lies with the tests, which are not in a wheel.
        from tests.chaos.command import chaos
    except ModuleNotFoundError as error:
        # The name tells a wheel from a checkout in which something that chaos imports is missing.
        if error.name not in ("tests", "tests.chaos", "tests.chaos.command"):
            raise
        raise UsageError("chaos needs a checkout of the repository: tests/chaos is not part of a package") from error
    return chaos(options.config, options.words, options.minutes)
