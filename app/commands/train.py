"""`train`, the default verb: start a run, or resume it where it stopped."""

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from contextlib import closing

from app.commands.options import add_config_arguments, read_config, run_on_cluster, without_option
from app.config import Config
from app.config.target import load_target
from app.config.variables import given_variables, taken_variables
from app.launch.detect import given_s, under_torchrun
from app.telemetry.console import Console


def add_arguments(parser: ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--job", action="store_true", help="as a Ray job, so that it outlives this terminal")
    # For torch.distributed.launch, which gives each rank its number so; the environment has it too.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=SUPPRESS)


def run(options: Namespace) -> int:
    """Train here, on a cluster, or as a job of this machine's cluster."""
    # Read here in each case, so that a mistake is told before the command goes anywhere.
    config = read_config(options)
    variables = taken_variables(config.cluster, os.environ)
    if options.cluster:
        # As a job there: the command must outlive the connection to the head.
        return run_on_cluster(options, "--job", variables=variables)
    if options.job:
        from app.launch.job import run_as_job

        return run_as_job(config, without_option(options.arguments, "--job"))
    return train(config, options.started_s, options.verbose)


def train(config: Config, started_s: float, verbose: bool) -> int:
    """Train under torchrun if that started this process, else under Ray. Return the exit code."""
    with closing(Console(verbose)) as console:
        if os.environ.get("RANK", "0") == "0":
            console.stage("starting", given_s(started_s))
        # User code is named by its import path, as seen from where the command was given.
        sys.path.insert(0, os.getcwd())
        # Processes that this one starts have them too: all workers of an embedded Ray.
        os.environ.update(given_variables(config.cluster))
        if not config.cluster.pip:  # or the user's code may need what only workers have
            # Workers load it again. A mistake found here costs a second, and one found there a start of Ray.
            for key, target in config.targets().items():
                load_target(target, key)

        if under_torchrun():
            from app.launch.torchrun import run_under_torchrun

            return run_under_torchrun(config, started_s, console)
        from app.launch.ray import launch

        return launch(config, started_s, console)
