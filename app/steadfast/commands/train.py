"""`train`, the default verb: start a run, or resume a stopped one."""

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from contextlib import closing

from steadfast.commands.options import add_config_arguments, read_config, run_on_cluster, without_option
from steadfast.config import Config
from steadfast.config.target import load_target
from steadfast.config.variables import given_variables, taken_variables
from steadfast.launch.detect import given_s, under_torchrun
from steadfast.run.directory import RunDirectory
from steadfast.telemetry.console import Console


def add_arguments(parser: ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--job", action="store_true", help="run as a Ray job, which outlives this terminal")
    # torch.distributed.launch passes this option to each rank. Its value is unused: the environment has it too.
    parser.add_argument("--local-rank", "--local_rank", type=int, help=SUPPRESS)


def run(options: Namespace) -> int:
    """Train here, on a cluster, or as a job of this machine's cluster."""
    # The configuration is read here in each case, so that mistakes are reported before the command goes anywhere.
    config = read_config(options)
    variables = taken_variables(config.cluster, os.environ)
    if options.cluster:
        # The command runs as a job on the cluster, because it must outlive the connection to the head.
        return run_on_cluster(options, "--job", variables=variables)
    if options.job:
        from steadfast.launch.job import run_as_job

        return run_as_job(RunDirectory.of(config), variables, without_option(options.arguments, "--job"))
    return train(config, options.started_s, options.verbose)


def train(config: Config, started_s: float, verbose: bool) -> int:
    """Train under torchrun if torchrun started this process, else under Ray.

    Return the exit code.
    """
    with closing(Console(verbose)) as console:
        if os.environ.get("RANK", "0") == "0":
            console.stage("starting", given_s(started_s))
        # Import paths of user code are relative to the working directory of the command.
        sys.path.insert(0, os.getcwd())
        # Child processes inherit the variables, such as the workers of an embedded Ray.
        os.environ.update(given_variables(config.cluster))
        if not config.cluster.pip:  # with `cluster.pip` the user's code may import packages that only workers have
            # Workers load the code again. A mistake found here costs a second, a mistake found there a start of Ray.
            for key, target in config.targets().items():
                load_target(target, key)

        if under_torchrun():
            from steadfast.launch.torchrun import run_under_torchrun

            return run_under_torchrun(config, started_s, console)
        from steadfast.launch.ray import launch

        return launch(config, started_s, console)
