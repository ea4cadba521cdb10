"""What copies of the state in the node's memory cost: the app with them beside the app without.

python -m tests.benchmarks.node_memory --pairs 20

Three of them take turns of some steps each (turns.py): with copies, without, and without again, whose ratio to the
second one is the A/A control. While a side waits for its turn its clock goes on, so its first step in each turn makes a
copy that it would not have made yet: the cost printed is an upper bound.
"""

import tempfile
from pathlib import Path

from steadfast.run.directory import RunDirectory
from tests.benchmarks.commands import parser_of_pairs
from tests.benchmarks.sides import COLUMNS, LIMIT, take_sides
from tests.benchmarks.speed import CASES, Case
from tests.benchmarks.statistics import compare_sides, table
from tests.support.events import event_lines


def compare(case: Case, num_pairs: int, steps_per_block: int, folder: Path) -> list[str]:
    """One row of the table."""
    on, off = ({"checkpoint": {"every": "1000000 steps", "node_memory": wanted}} for wanted in (True, False))
    seconds = take_sides(case, num_pairs, steps_per_block, folder, on, off)
    run = RunDirectory.at(str(folder / "runs" / "with"))
    (copied,) = [event for event in event_lines(run) if event["event"] == "snapshot"]
    return [
        case.name,
        f"{copied['bytes'] / 2**20:.0f} MiB",
        f"{1e3 * copied['stall_s']:.0f}",
        *compare_sides(seconds, steps_per_block, LIMIT),
    ]


def main() -> None:
    parser = parser_of_pairs(20)
    parser.add_argument("--steps", type=int, default=24, help="of a turn")
    options = parser.parse_args()
    rows = [["model", "a copy", "first blocked ms", *COLUMNS]]
    with tempfile.TemporaryDirectory(prefix="node-memory-") as folder:
        rows.append(compare(CASES["10m"], options.pairs, options.steps, Path(folder)))
    print(table(rows))
    print(f"{options.pairs} pairs of {options.steps} steps; verdict: the interval reaches down to {LIMIT}")


if __name__ == "__main__":
    main()
