"""What TensorBoard and Weights & Biases side by side cost: the app with both beside the app with none.

python -m tests.benchmarks.trackers --pairs 20              # figures of every step
python -m tests.benchmarks.trackers --pairs 20 --every 10   # as often as by default
"""

import tempfile
from pathlib import Path

from tests.benchmarks.commands import parser_of_pairs
from tests.benchmarks.sides import COLUMNS, LIMIT, take_sides
from tests.benchmarks.speed import CASES, Case
from tests.benchmarks.statistics import compare_sides, table

BOTH = [{"kind": "tensorboard"}, {"kind": "wandb", "mode": "offline"}]


def compare(case: Case, num_pairs: int, steps_per_block: int, every: int, folder: Path) -> list[str]:
    """One row of the table."""
    common = {"logging": {"every_steps": every}, "checkpoint": {"every": "1000000 steps"}}
    seconds = take_sides(
        case, num_pairs, steps_per_block, folder, {**common, "trackers": BOTH}, {**common, "trackers": []}
    )
    return [case.name, *compare_sides(seconds, steps_per_block, LIMIT)]


def main() -> None:
    parser = parser_of_pairs(20)
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    parser.add_argument("--every", type=int, default=1, help="steps between figures")
    options = parser.parse_args()
    rows = [["model", *COLUMNS]]
    with tempfile.TemporaryDirectory(prefix="trackers-") as folder:
        rows.append(compare(CASES["10m"], options.pairs, options.steps, options.every, Path(folder)))
    print(table(rows))
    turns = f"{options.pairs} pairs of {options.steps} steps, figures every {options.every}"
    print(f"{turns}; verdict: the interval reaches down to {LIMIT}")


if __name__ == "__main__":
    main()
