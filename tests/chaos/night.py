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

_MEAN_S = 15.0  # between two faults
_MICROBATCHES = 2  # of a worker in a step
_STALLED = 0.25  # share of the time without progress, roughly


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2000, help="about so many; the steps follow from them")
    options = parser.parse_args(arguments)
    steps = round(options.faults * _MEAN_S * (1 - _STALLED) / (_MICROBATCHES * PACE_S + 0.02))
    plan = [(poisson(_MEAN_S, steps), OURS)]
    return run_all(plan, Choice("ddp.yaml", (), num_workers=4), Path("runs/night"), minutes=1.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
