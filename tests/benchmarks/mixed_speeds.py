"""What `batch.balance: speed` gains on unequal workers, and what it costs on equal ones.

python -m tests.benchmarks.mixed_speeds --pairs 24

Two workers whose microbatches are slowed by `slow_at`, so nearly all of a step is sleep and the machine's own speed
matters little. Three runs live side by side and take turns (turns.py): speed, even, and even again for the A/A control.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from steadfast.run.ledger import read_shares
from steadfast.storage import LocalStore
from steadfast.tasks import LanguageModeling, Sums
from tests.benchmarks.commands import app_under_torchrun, parser_of_pairs, write_config
from tests.benchmarks.speed import Case, app_sections, take_turns
from tests.benchmarks.statistics import compare_sides, paired_ratio, table
from tests.benchmarks.turns import Turns
from tests.support.history import read_ledger

NUM_MICROBATCHES = 16
STEPS_PER_BLOCK = 16  # the first one, which is not counted, is when the shares change
CASES = {"3:1": (20, 60), "1:1": (20, 20)}  # milliseconds that a microbatch of each worker takes longer
SIDES = {"speed": "speed", "even": "even", "control": "even"}
LIMITS = {"3:1": 1 / 1.75, "1:1": 1.02}  # of speed's time in even's
MODEL = {"num_layers": 1, "num_heads": 2, "embed_dim": 16, "context_length": 16}
RUN = Case("small", MODEL, 2 * NUM_MICROBATCHES, 2, STEPS_PER_BLOCK)


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
    shares = read_shares(read_ledger(LocalStore(folder / "runs" / "speed")).lines[-1]) or []
    speed_ms, even_ms, _, control, found = compare_sides(seconds, STEPS_PER_BLOCK, LIMITS[case])
    speed_up = str(paired_ratio(seconds["even"], seconds["speed"]))
    return [case, ":".join(map(str, shares)), speed_ms, even_ms, speed_up, control, found]


def _config(case: str, side: str, num_blocks: int, folder: Path) -> Path:
    slow: list[dict[str, Any]] = [
        {"kind": "slow_at", "ranks": [rank], "ms": added_ms} for rank, added_ms in enumerate(CASES[case])
    ]
    sections = app_sections(
        RUN,
        side,
        num_blocks,
        folder,
        batch={"balance": SIDES[side]},
        parallel={"kind": "ddp", "reducer": "torch"},  # whose model tells which microbatch is the last
        faults={"inject": slow},
        task={
            "target": "tests.benchmarks.mixed_speeds:SharedTurnsTask",
            "args": {"folder": str(folder), "side": side, "num_blocks": num_blocks},
        },
    )
    return write_config(folder / f"{side}.yaml", **sections)


def main() -> None:
    options = parser_of_pairs(24).parse_args()
    rows = [["workers", "shares", "speed ms/step", "even ms/step", "speed-up [95 %]", "A/A [95 %]", "verdict"]]
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="mixed-speeds-") as folder:
            rows.append(compare(case, options.pairs, Path(folder)))
    print(table(rows))
    limits = "1.75 on unequal workers, 1/1.02 on equal ones"
    print(f"{options.pairs} pairs, {NUM_MICROBATCHES} microbatches; verdict: the interval reaches up to {limits}")


if __name__ == "__main__":
    main()
