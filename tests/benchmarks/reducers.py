"""Milliseconds a step of `parallel.kind: ddp` with gradient buckets of our own, beside DistributedDataParallel.

python -m tests.benchmarks.reducers --pairs 24

The same application under torchrun, three times: `reducer: steadfast`, `reducer: torch`, and the latter again for the
A/A control. They take turns as in throughput.py. Four workers on two cores wait for each other's processors too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from tests.benchmarks.commands import app_under_torchrun, end_on_sigterm, write_config
from tests.benchmarks.speed import CASES, Case, take_turns
from tests.benchmarks.statistics import paired_ratio, table, verdict

LIMIT = 1.05
SIDES = {"buckets": "steadfast", "ddp": "torch", "control": "torch"}


def compare(case: Case, num_workers: int, num_pairs: int, folder: Path) -> list[str]:
    """One row of the table."""
    num_blocks = num_pairs + 1
    commands = {}
    for side in SIDES:
        commands[side] = app_under_torchrun(_config(case, side, num_workers, num_blocks, folder), num_workers)
    seconds = take_turns(commands, num_blocks, folder, num_workers)
    step_ms = {side: 1e3 * median(seconds[side]) / case.steps_per_block for side in SIDES}
    ratio = paired_ratio(seconds["buckets"], seconds["ddp"])
    return [
        case.name,
        str(num_workers),
        f"{step_ms['buckets']:.1f}",
        f"{step_ms['ddp']:.1f}",
        str(ratio),
        str(paired_ratio(seconds["ddp"], seconds["control"])),
        verdict(ratio, LIMIT),
    ]


def _config(case: Case, side: str, num_workers: int, num_blocks: int, folder: Path) -> Path:
    turns = {
        "folder": str(folder),
        "side": side,
        "num_forwards": case.num_forwards(num_workers),
        "steps_per_block": case.steps_per_block,
        "num_blocks": num_blocks,
    }
    return write_config(
        folder / f"{side}.yaml",
        run={"storage": str(folder / "runs"), "name": side, "steps": num_blocks * case.steps_per_block + 1},
        parallel={"kind": "ddp", "reducer": SIDES[side]},
        batch={"global_size": case.global_size, "microbatch_size": case.microbatch_size},
        model={"kind": "gpt", **case.model},
        data={"kind": "text", "context_length": case.model["context_length"], "validation_fraction": 0.0},
        schedule={"kind": "cosine", "warmup_steps": 1},
        task={"target": "tests.benchmarks.turns:TurnTakingTask", "args": turns},
    )


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--model", choices=CASES, action="append", help="default: all")
    parser.add_argument("--workers", type=int, action="append", help="default: 1, 2 and 4")
    options = parser.parse_args()
    rows = [["model", "workers", "buckets ms/step", "ddp ms/step", "ratio [95 %]", "A/A [95 %]", "verdict"]]
    for name in options.model or CASES:
        for num_workers in options.workers or (1, 2, 4):
            with tempfile.TemporaryDirectory(prefix="reducers-") as folder:
                rows.append(compare(CASES[name], num_workers, options.pairs, Path(folder)))
    print(table(rows))
    print(f"{options.pairs} pairs; verdict: the interval reaches down to {LIMIT}")


if __name__ == "__main__":
    main()
