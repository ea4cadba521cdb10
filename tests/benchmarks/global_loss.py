"""What a loss over the global batch costs: our step of four microbatches beside a plain contrastive step, one process.

python -m tests.benchmarks.global_loss --pairs 20

The plain step embeds the global batch in one forward and keeps all of its activations. Ours keeps those of a microbatch
and embeds each of them twice, so a third more work is expected. A further plain step is the A/A control.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadfast.config import Config, load_config
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import build_parallel
from steadfast.step.global_step import GlobalStepper
from steadfast.world.groups import WorldRank
from steadfast.world.runtime import WorkerProcess, form_world
from tests.benchmarks.statistics import paired_ratio, table
from tests.examples.clip import Contrast
from tests.support.stepping import build_stepper

CPU = torch.device("cpu")


class PlainLoop:
    """Contrastive training as users write it: the whole global batch in one forward."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        self._model, self._batch, self._task = model, batch, Contrast()
        self._optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(self) -> None:
        sums = self._task.loss(self._task.embed(self._model, self._batch))
        (sums.loss_sum / sums.count).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def configuration(folder: Path) -> Config:
    words = [f"run.storage={folder}", "run.steps=100000", "model.args={width: 512, hidden: 2048}"]
    return load_config("configs/clip.yaml", [*words, "data.validation_fraction=0"])


def compare(num_pairs: int, folder: Path) -> list[str]:
    """One row of the table."""
    config = configuration(folder)
    worker = WorkerState(config, CPU)
    world = form_world(dist.HashStore(), WorldRank(0, 1, 1), WorkerProcess(CPU))
    parallel = build_parallel(config.parallel, world, worker.precision)
    stepper, batches = build_stepper(world, config, worker, parallel)
    assert isinstance(stepper, GlobalStepper)
    example = worker.loader.example(config.batch.global_size)
    plain, control = (PlainLoop(WorkerState(config, CPU).model, example) for _ in range(2))
    seconds: dict[str, list[float]] = {"ours": [], "plain": [], "control": []}
    for step in range(1, num_pairs + 3):
        sides: dict[str, Callable[[], object]] = {"ours": lambda step=step: stepper.step(step, batches)}  # type: ignore[misc]
        sides |= {"plain": plain.step, "control": control.step}
        for name, act in sides.items():
            began_s = time.perf_counter()
            act()
            if step > 2:
                seconds[name].append(time.perf_counter() - began_s)
    world.groups.destroy()
    milliseconds = [f"{1e3 * median(seconds[name]):.1f}" for name in ("ours", "plain")]
    ratio = paired_ratio(seconds["ours"], seconds["plain"])
    return [*milliseconds, str(ratio), str(paired_ratio(seconds["plain"], seconds["control"]))]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="global-loss-") as folder:
        row = compare(options.pairs, Path(folder))
    print(table([["ours ms/step", "plain", "ratio [95 %]", "A/A [95 %]"], row]))


if __name__ == "__main__":
    main()
