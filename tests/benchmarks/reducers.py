"""Milliseconds a step of `parallel.kind: ddp` with gradient buckets of our own, beside DistributedDataParallel.

python -m tests.benchmarks.reducers --pairs 24

The same application under torchrun, three times: `reducer: steadfast`, `reducer: torch`, and the latter again for the
A/A control. They take turns as in speed.py. Four workers on two cores wait for each other's processors too.
"""

import tempfile
from pathlib import Path

from tests.benchmarks.commands import app_under_torchrun, parser_of_pairs, write_config
from tests.benchmarks.speed import CASES, Case, app_sections, take_turns
from tests.benchmarks.statistics import compare_sides, table

LIMIT = 1.05
SIDES = {"buckets": "steadfast", "ddp": "torch", "control": "torch"}


def compare(case: Case, num_workers: int, num_pairs: int, folder: Path) -> list[str]:
    """One row of the table."""
    num_blocks = num_pairs + 1
    commands = {}
    for side, reducer in SIDES.items():
        parallel = {"kind": "ddp", "reducer": reducer}
        sections = app_sections(case, side, num_blocks, folder, num_workers, parallel=parallel)
        commands[side] = app_under_torchrun(write_config(folder / f"{side}.yaml", **sections), num_workers)
    seconds = take_turns(commands, num_blocks, folder, num_workers)
    return [case.name, str(num_workers), *compare_sides(seconds, case.steps_per_block, LIMIT)]


def main() -> None:
    options = parser_of_pairs(24).parse_args()
    rows = [["model", "workers", "buckets ms/step", "ddp ms/step", "ratio [95 %]", "A/A [95 %]", "verdict"]]
    for case in CASES.values():
        for num_workers in (1, 2, 4):
            with tempfile.TemporaryDirectory(prefix="reducers-") as folder:
                rows.append(compare(case, num_workers, options.pairs, Path(folder)))
    print(table(rows))
    print(f"{options.pairs} pairs; verdict: the interval reaches down to {LIMIT}")


if __name__ == "__main__":
    main()
