"""Milliseconds a step: this app under Ray beside the peer under torchrun, on the same machine at the same time.

python -m tests.benchmarks.speed --pairs 24
python -m tests.benchmarks.speed --pairs 24 --parallel fsdp --compile blocks --launcher torchrun

Three contenders are started once and then take turns of a few steps each (turns.py): the app, the peer, and the peer
again, whose ratio to the first one is the A/A control. Each round is one pair of both; the order is reversed from
round to round, so that neither drift nor a place in the order favours anyone.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from steadfast.config import GptConfig
from steadfast.models.gpt import Gpt
from tests.benchmarks.commands import (
    NUM_WORKERS,
    Running,
    app_under_ray,
    app_under_torchrun,
    end_on_sigterm,
    peer,
    write_config,
)
from tests.benchmarks.statistics import paired_ratio, table, verdict
from tests.benchmarks.turns import give_turn

LIMIT = 1.05
LIMITS = {"ddp": 1.03, "fsdp": LIMIT}  # of the peer's time
SIDES = ("ours", "peer", "control")
_START_S, _TURN_S = 300.0, 120.0


@dataclass(frozen=True)
class Case:
    name: str
    model: dict[str, Any]
    global_size: int
    microbatch_size: int
    steps_per_block: int

    def num_forwards(self, num_workers: int = NUM_WORKERS) -> int:
        return self.global_size // (self.microbatch_size * num_workers)

    @property
    def num_params(self) -> int:
        return sum(p.numel() for p in Gpt(GptConfig(**self.model)).parameters())


CASES = {
    "10m": Case("gpt 10M", {"num_layers": 6, "num_heads": 6, "embed_dim": 384, "context_length": 128}, 8, 2, 2),
    "10ms": Case("gpt 10 ms", {"num_layers": 2, "num_heads": 2, "embed_dim": 64, "context_length": 32}, 8, 2, 100),
}


def compare(case: Case, options: argparse.Namespace, folder: Path) -> list[str]:
    """One row of the table."""
    num_pairs, launcher = options.pairs, options.launcher
    num_blocks = num_pairs + 1
    turns = {"block": case.steps_per_block, "blocks": num_blocks}
    config = write_config(
        folder / f"{case.name.replace(' ', '-')}.yaml",
        run={"storage": str(folder / "runs"), "steps": num_blocks * case.steps_per_block + 1},
        batch={"global_size": case.global_size, "microbatch_size": case.microbatch_size},
        model={"kind": "gpt", **case.model},
        parallel={"kind": options.parallel},
        compile=options.compile,
        data={"kind": "text", "context_length": case.model["context_length"], "validation_fraction": 0.0},
        schedule={"kind": "cosine", "warmup_steps": 1},
        task={
            "target": "tests.benchmarks.turns:TurnTakingTask",
            "args": {
                "folder": str(folder),
                "num_forwards": case.num_forwards(),
                "steps_per_block": case.steps_per_block,
                "num_blocks": num_blocks,
            },
        },
    )
    commands = {
        "ours": app_under_ray(config) if launcher == "ray" else app_under_torchrun(config),
        "peer": peer(config, turns=folder, side="peer", **turns),
        "control": peer(config, turns=folder, side="control", **turns),
    }
    seconds = take_turns(commands, num_blocks, folder)
    ratio = paired_ratio(seconds["ours"], seconds["peer"])
    step_ms = {side: 1e3 * median(seconds[side]) / case.steps_per_block for side in SIDES}
    return [
        case.name,
        f"{case.num_params / 1e6:.2f} M",
        f"{step_ms['ours']:.1f}",
        f"{step_ms['peer']:.1f}",
        str(ratio),
        str(paired_ratio(seconds["peer"], seconds["control"])),
        verdict(ratio, LIMITS[options.parallel]),
    ]


def take_turns(
    commands: dict[str, list[str]], num_blocks: int, folder: Path, num_workers: int = NUM_WORKERS
) -> dict[str, list[float]]:
    """Starts all sides and lets them take turns. The seconds of each side's blocks, but for the first."""
    seconds: dict[str, list[float]] = {side: [] for side in commands}
    sides = list(commands)
    with ExitStack() as stack:
        running = [stack.enter_context(Running(side, commands[side], folder / f"{side}.log")) for side in sides]

        def still_alive() -> None:
            for each in running:
                each.check()

        for block in range(num_blocks):
            for side in sides if block % 2 else sides[::-1]:
                limit_s = _TURN_S if block else _START_S
                took = give_turn(folder, side, block, num_workers, limit_s, still_alive)
                if block:
                    seconds[side].append(took)
    return seconds


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=24)
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
