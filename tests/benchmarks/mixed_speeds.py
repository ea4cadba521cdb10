"""What `batch.balance: speed` gains on unequal workers, and what it costs on equal ones.

python -m tests.benchmarks.mixed_speeds --pairs 24

Two workers whose microbatches are slowed by `slow_at`, so nearly all of a step is sleep and the machine's own speed
matters little. Three runs live side by side and take turns (turns.py): speed, even, and even again for the A/A control.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from steadfast.run.ledger import read_shares
from steadfast.storage import LocalStore
from steadfast.tasks import LanguageModeling, Sums
from tests.benchmarks.commands import app_under_torchrun, end_on_sigterm, write_config
from tests.benchmarks.speed import take_turns
from tests.benchmarks.statistics import paired_ratio, table, verdict
from tests.benchmarks.turns import Turns
from tests.support.history import read_ledger

NUM_MICROBATCHES = 16
STEPS_PER_BLOCK = 16  # the first one, which is not counted, is when the shares change
CASES = {"3:1": (20, 60), "1:1": (20, 20)}  # milliseconds that a microbatch of each worker takes longer
SIDES = {"speed": "speed", "even": "even", "control": "even"}
LIMITS = {"3:1": 1 / 1.75, "1:1": 1.02}  # of speed's time in even's
MODEL = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "context_length": 16}


class SharedTurnsTask(LanguageModeling):
    """Asks for its turn at the first microbatch of each step, however many this worker has."""

    def __init__(self, folder: str, side: str, num_blocks: int) -> None:
        self._arguments = folder, side
        self._num_blocks = num_blocks
        self._turns: Turns | None = None
        self._first = True

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        if len(batch[0]) > 1:  # a single sample is the warm-up before the first step
            self._turns = self._turns or Turns(*self._arguments, dist.get_rank(), STEPS_PER_BLOCK, self._num_blocks)
            if self._first:
                self._turns.step_begins()
            self._first = bool(model.require_backward_grad_sync)  # DDP adds gradients up on the last one
        return super().loss(model, batch)


def compare(case: str, num_pairs: int, folder: Path) -> list[str]:
    """One row of the table."""
    commands = {side: app_under_torchrun(_config(case, side, num_pairs + 1, folder)) for side in SIDES}
    seconds = take_turns(commands, num_pairs + 1, folder)
    step_ms = {side: 1e3 * median(seconds[side]) / STEPS_PER_BLOCK for side in SIDES}
    shares = read_shares(read_ledger(LocalStore(folder / "runs" / "speed")).lines[-1]) or []
    return [
        case,
        ":".join(map(str, shares)),
        f"{step_ms['speed']:.1f}",
        f"{step_ms['even']:.1f}",
        str(paired_ratio(seconds["even"], seconds["speed"])),
        str(paired_ratio(seconds["even"], seconds["control"])),
        verdict(paired_ratio(seconds["speed"], seconds["even"]), LIMITS[case]),
    ]


def _config(case: str, side: str, num_blocks: int, folder: Path) -> Path:
    slow: list[dict[str, Any]] = [
        {"kind": "slow_at", "ranks": [rank], "ms": added_ms} for rank, added_ms in enumerate(CASES[case])
    ]
    args = {"folder": str(folder), "side": side, "num_blocks": num_blocks}
    return write_config(
        folder / f"{side}.yaml",
        run={"storage": str(folder / "runs"), "name": side, "steps": num_blocks * STEPS_PER_BLOCK + 1},
        batch={"global_size": 2 * NUM_MICROBATCHES, "microbatch_size": 2, "balance": SIDES[side]},
        parallel={"kind": "ddp", "reducer": "torch"},  # whose model tells which microbatch is the last
        model={"kind": "gpt", **MODEL},
        data={"kind": "text", "context_length": MODEL["context_length"], "validation_fraction": 0.0},
        schedule={"kind": "cosine", "warmup_steps": 1},
        faults={"inject": slow},
        task={"target": "tests.benchmarks.mixed_speeds:SharedTurnsTask", "args": args},
    )


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    options = parser.parse_args()
    rows = [["workers", "shares", "speed ms/step", "even ms/step", "speed-up [95 %]", "A/A [95 %]", "verdict"]]
    for case in options.case or CASES:
        with tempfile.TemporaryDirectory(prefix="mixed-speeds-") as folder:
            rows.append(compare(case, options.pairs, Path(folder)))
    print(table(rows))
    limits = "1.75 on unequal workers, 1/1.02 on equal ones"
    print(f"{options.pairs} pairs, {NUM_MICROBATCHES} microbatches; verdict: the interval reaches up to {limits}")


if __name__ == "__main__":
    main()
