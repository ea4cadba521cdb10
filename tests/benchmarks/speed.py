"""Milliseconds a step: this app under Ray beside the peer under torchrun, on the same machine at the same time.

python -m tests.benchmarks.speed --pairs 24
python -m tests.benchmarks.speed --pairs 24 --parallel fsdp --compile blocks --launcher torchrun

Three contenders are started once and then take turns of a few steps each (turns.py): the app, the peer, and the peer
again, whose ratio to the first one is the A/A control. Each round is one pair of both; the order is reversed from
round to round, so that neither drift nor a place in the order favours anyone.
"""

import argparse
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadfast.config import GptConfig
from steadfast.models.gpt import Gpt
from tests.benchmarks.commands import (
    NUM_WORKERS,
    Running,
    app_under_ray,
    app_under_torchrun,
    parser_of_pairs,
    peer,
    write_config,
)
from tests.benchmarks.statistics import compare_sides, table
from tests.benchmarks.turns import take_blocks

LIMIT = 1.05
LIMITS = {"ddp": 1.03, "fsdp": LIMIT}  # of the peer's time


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, Any]
    global_size: int
    microbatch_size: int
    steps_per_block: int

    def num_forwards(self, num_workers: int = NUM_WORKERS) -> int:
        return self.global_size // (self.microbatch_size * num_workers)

    def sections(self) -> dict[str, Any]:
        """Return model, data and batch, as a configuration has them."""
        return {
            "batch": {"global_size": self.global_size, "microbatch_size": self.microbatch_size},
            "model": {"kind": "gpt", **self.model},
            "data": {"kind": "text", "context_length": self.model["context_length"], "validation_fraction": 0.0},
        }

    @property
    def num_params(self) -> int:
        return sum(p.numel() for p in Gpt(GptConfig(**self.model)).parameters())


CASES = {
    "10m": Case("gpt 10M", {"num_layers": 6, "num_heads": 6, "embed_dim": 384, "context_length": 128}, 8, 2, 2),
    "10ms": Case("gpt 10 ms", {"num_layers": 2, "num_heads": 2, "embed_dim": 64, "context_length": 32}, 8, 2, 100),
}


def app_sections(
    case: Case,
    side: str,
    num_blocks: int,
    folder: Path,
    num_workers: int = NUM_WORKERS,
    num_before: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """Return the configuration of an app that takes turns as one side.

    Args:
        folder: in which turns are given.
        num_before: steps before the first turn.
        changes: sections that are added, or whose keys replace those here.
    """
    turns = {
        "folder": str(folder),
        "side": side,
        "num_before": num_before,
        "num_forwards": case.num_forwards(num_workers),
        "steps_per_block": case.steps_per_block,
        "num_blocks": num_blocks,
    }
    num_steps = num_before + num_blocks * case.steps_per_block + 1
    sections: dict[str, Any] = {
        "run": {"storage": str(folder / "runs"), "name": side, "steps": num_steps, "report": False},
        **case.sections(),
        "schedule": {"kind": "cosine", "warmup_steps": 1},
        "task": {"target": "tests.benchmarks.turns:TurnTakingTask", "args": turns},
    }
    for key, section in changes.items():
        sections[key] = {**sections.get(key, {}), **section} if isinstance(section, Mapping) else section
    return sections


def compare(case: Case, options: argparse.Namespace, folder: Path) -> list[str]:
    """One row of the table."""
    num_blocks = options.pairs + 1
    turns = {"turns": folder, "block": case.steps_per_block, "blocks": num_blocks}
    changes = {"parallel": {"kind": options.parallel}, "compile": options.compile}
    config = write_config(folder / "ours.yaml", **app_sections(case, "ours", num_blocks, folder, **changes))
    commands = {
        "ours": app_under_ray(config) if options.launcher == "ray" else app_under_torchrun(config),
        "peer": peer(config, side="peer", **turns),
        "control": peer(config, side="control", **turns),
    }
    seconds = take_turns(commands, num_blocks, folder)
    cells = compare_sides(seconds, case.steps_per_block, LIMITS[options.parallel])
    return [case.name, f"{case.num_params / 1e6:.2f} M", *cells]


def take_turns(
    commands: dict[str, list[str]], num_blocks: int, folder: Path, num_workers: int = NUM_WORKERS
) -> dict[str, list[float]]:
    """Starts all sides and lets them take turns. The seconds of each side's blocks, but for the first."""
    with ExitStack() as stack:
        running = []
        for side, command in commands.items():
            running.append(stack.enter_context(Running(side, command, folder / f"{side}.log")))

        def still_alive() -> None:
            for each in running:
                each.check()

        return take_blocks(list(commands), num_blocks, folder, num_workers, still_alive)


def main() -> None:
    parser = parser_of_pairs(24)
    parser.add_argument("--model", choices=CASES, action="append", help="default: all")
    parser.add_argument("--launcher", choices=("ray", "torchrun"), default="ray", help="what starts the app")
    parser.add_argument("--parallel", choices=LIMITS, default="ddp")
    parser.add_argument("--compile", choices=("none", "blocks"), default="none")
    options = parser.parse_args()
    rows = [["model", "parameters", "ours ms/step", "peer ms/step", "ratio [95 %]", "A/A [95 %]", "verdict"]]
    for name in options.model or CASES:
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            rows.append(compare(CASES[name], options, Path(folder)))
    print(table(rows))
    what = f"{options.parallel}, compile={options.compile}, under {options.launcher}, {NUM_WORKERS} workers"
    limit = LIMITS[options.parallel]
    print(f"{what}; {options.pairs} pairs; verdict: the interval reaches down to {limit}")


if __name__ == "__main__":
    main()
