"""`chaos`: inject every fault into this application, stock Ray Train and torchrun."""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace

from steadfast.commands.options import add_config_arguments, read_config, run_on_cluster
from steadfast.errors import UsageError


def add_arguments(parser: ArgumentParser) -> None:
    add_config_arguments(parser)
    minutes = "start nothing later than this many minutes: 4.1 by default, 12 for all faults; with --storm 13 and 120"
    parser.add_argument("--minutes", type=float, metavar="N", help=minutes)
    storm = "random faults instead, the same for all contenders, one after another; table and logs go to runs/storm"
    parser.add_argument("--storm", action="store_true", help=storm)
    parser.add_argument("--mean", type=_seconds, default=15.0, metavar="15s", help="mean time between random faults")


def _seconds(text: str) -> float:
    """Return the seconds of a time as in 15s, 2m or 20."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m)?", text)
    if match is None or float(match[1]) == 0:
        raise ArgumentTypeError(f"{text!r} is no time; give seconds or minutes, for example 15s or 2m")
    return float(match[1]) * (60 if match[2] == "m" else 1)


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
    minutes = options.minutes
    if options.storm:
        from tests.chaos.storm_runs import storm

        return storm(options.config, options.words, options.mean, 13.0 if minutes is None else minutes)
    return chaos(options.config, options.words, 4.1 if minutes is None else minutes)
