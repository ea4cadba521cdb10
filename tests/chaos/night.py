"""A long storm for this application alone: `python -m tests.chaos.night --faults 2000` takes about nine hours.

Four workers have a fault every 15 seconds. The exit code is 1 if a sample is lost or used twice, or if the weights have
other bits than those of an undisturbed run. `runs/night` has the figures, the logs and the events.
"""

import argparse
import sys
from pathlib import Path

from tests.chaos.contenders import OURS
from tests.chaos.matrix import PACE_S
from tests.chaos.schedules import poisson
from tests.chaos.storm_runs import Choice, run_all

_MICROBATCHES = 2  # of a worker in a step
_STALLED = 0.25  # share of the time without progress, roughly


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2000, help="about so many; the steps follow from them")
    parser.add_argument("--mean", type=float, default=15.0, help="seconds between two faults")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--config", default="ddp.yaml")
    options = parser.parse_args(arguments)
    steps = round(options.faults * options.mean * (1 - _STALLED) / (_MICROBATCHES * PACE_S + 0.02))
    plan = [(poisson(options.mean, steps), OURS)]
    return run_all(plan, Choice(options.config, (), options.workers), Path("runs/night"), minutes=1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
