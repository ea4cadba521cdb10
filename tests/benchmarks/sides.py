"""The app with something on beside the app without it, and without it again for the A/A control, in turns (turns.py).

python -m tests.benchmarks.sides copies --pairs 20
python -m tests.benchmarks.sides trackers --pairs 20 --every 1   # TensorBoard and W&B, figures of each step
python -m tests.benchmarks.sides exact --pairs 20
python -m tests.benchmarks.sides reducers --pairs 20 --model 10ms --workers 4   # our gradient buckets beside DDP's

While a side waits for its turn its clock goes on, so with copies in node memory its first step in each turn makes a
copy that it would not have made yet: the cost printed is an upper bound.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from steadfast.run.directory import RunDirectory
from tests.benchmarks.commands import NUM_WORKERS, app_under_torchrun, parser_of_pairs, write_config
from tests.benchmarks.speed import CASES, Case, app_sections, take_turns
from tests.benchmarks.statistics import compare_sides, table
from tests.support.events import event_lines


class Subject(NamedTuple):
    """What is compared.

    Attributes:
        on, off: sections of the configuration of the first side, and of both others.
        steps: of a turn; None for those of the model's case.
        limit: of the time without it.
    """

    on: Mapping[str, Any]
    off: Mapping[str, Any]
    steps: int | None
    limit: float


BOTH = [{"kind": "tensorboard"}, {"kind": "wandb", "mode": "offline"}]
NO_COPIES = {"node_memory": False}
SUBJECTS = {
    "copies": Subject({"checkpoint": {"node_memory": True}}, {"checkpoint": NO_COPIES}, 24, 1.01),
    "trackers": Subject({"trackers": BOTH}, {"trackers": []}, 12, 1.01),
    "reducers": Subject(
        {"parallel": {"kind": "ddp", "reducer": "steadfast"}},
        {"parallel": {"kind": "ddp", "reducer": "torch"}},
        None,
        1.05,
    ),
    "exact": Subject({"run": {"exact": True}, "checkpoint": NO_COPIES}, {"checkpoint": NO_COPIES}, 4, 1.25),
}


def take_sides(
    subject: Subject, case: Case, num_workers: int, num_pairs: int, every: int, folder: Path
) -> dict[str, list[float]]:
    """Return the seconds of each turn by side: "with", "without" and "control"."""
    commands = {}
    for side in ("with", "without", "control"):
        changes = {"logging": {"every_steps": every}, **(subject.on if side == "with" else subject.off)}
        sections = app_sections(case, side, num_pairs + 1, folder, num_workers, **changes)
        sections["checkpoint"] = {"every": "1000000 steps", **sections.get("checkpoint", {})}
        commands[side] = app_under_torchrun(write_config(folder / f"{side}.yaml", **sections), num_workers)
    return take_turns(commands, num_pairs + 1, folder, num_workers)


def main() -> None:
    parser = parser_of_pairs(20)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--model", choices=CASES, default="10m")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS)
    parser.add_argument("--every", type=int, default=10, help="steps between figures")
    options = parser.parse_args()
    subject = SUBJECTS[options.subject]
    case = CASES[options.model]
    case = replace(case, steps_per_block=subject.steps or case.steps_per_block)
    with tempfile.TemporaryDirectory(prefix="sides-") as folder:
        seconds = take_sides(subject, case, options.workers, options.pairs, options.every, Path(folder))
        lines = event_lines(RunDirectory.at(f"{folder}/runs/with"))
    titles = ["model", "workers", "with ms/step", "without", "ratio [95 %]", "A/A [95 %]", "verdict"]
    cells = compare_sides(seconds, case.steps_per_block, subject.limit)
    print(table([titles, [case.name, str(options.workers), *cells]]))
    for copied in (line for line in lines if line["event"] == "snapshot"):
        print(f"a copy: {copied['bytes'] / 2**20:.0f} MiB, the first one blocks for {1e3 * copied['stall_s']:.0f} ms")
    turns = f"{options.pairs} pairs of {case.steps_per_block} steps, figures every {options.every}"
    print(f"{turns}; verdict: the interval reaches down to {subject.limit}")


if __name__ == "__main__":
    main()
