"""Time of the host between a step's gate and the next forward, in updates by a bare AdamW.

python -m tests.benchmarks.host --steps 600

Meanwhile a GPU has nothing to do. One worker trains a model of 149 small parameters, as many as a GPT of 12 layers has,
and between its steps a bare AdamW updates as many. Both are fused, and both are timed by the CPU time of their thread,
which other processes on the machine hardly change. A message goes to the other ranks as often as at steps of 10 ms.
"""

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from steadfast.__main__ import main as steadfast
from steadfast.step.stepper import Stepper
from steadfast.world import control
from steadfast.world.groups import Groups
from tests.benchmarks.statistics import Estimate, paired_ratio, table, verdict

LIMIT = 1.3
_NUM_PARAMETERS = 149
_STEPS_PER_MESSAGE = 5
_WARM_UP = 50
_BLOCK = 10  # steps of which one pair is made

_Adamw = torch.optim.AdamW


class Many(nn.Module):
    """Model of many small parameters, whose forward is short."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(0.01 * torch.randn(8, 8)) for _ in range(_NUM_PARAMETERS)])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ torch.stack(list(self.weights)).sum(0)


class Numbers(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = torch.linspace(0.0, 1.0, 8) * index / 1000
        return numbers, numbers


class _Fused(_Adamw):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "fused": True})


class Times:
    """CPU seconds of each step: from the gate to the forward, and of an update by a bare AdamW."""

    def __init__(self) -> None:
        self.between: list[float] = []
        self.bare: list[float] = []
        self._gate_s: float | None = None
        params = list(Many().parameters())
        for param in params:
            param.grad = torch.zeros_like(param)
        self._optimizer = _Adamw(params, fused=True)

    def gate(self, groups: Groups, gate: Callable[[Groups], None]) -> None:
        gate(groups)
        self._gate_s = thread_time()

    def forward(self) -> None:
        now_s = thread_time()
        if self._gate_s is None:
            return
        self.between.append(now_s - self._gate_s)
        self._gate_s = None
        began_s = thread_time()
        self._optimizer.step()
        self.bare.append(thread_time() - began_s)


def measure(num_steps: int) -> tuple[Estimate, Estimate]:
    """Return the ratio of the time to a bare update, and of bare updates to the next ones."""
    times = Times()
    gate, loss_of = Groups.gate, Stepper._loss_of

    def forward(stepper: Stepper, part: Any) -> Any:
        times.forward()
        return loss_of(stepper, part)

    changed: dict[Any, dict[str, Any]] = {
        Groups: {"gate": lambda groups: times.gate(groups, gate)},
        Stepper: {"_loss_of": forward},
        torch.optim: {"AdamW": _Fused},
        control._Pace: {"steps_per_message": lambda pace: _STEPS_PER_MESSAGE},
    }
    for place, names in changed.items():
        for name, value in names.items():
            setattr(place, name, value)
    with tempfile.TemporaryDirectory() as folder:
        _train(Path(folder), num_steps)
    ours, bare = (_by_block(side[_WARM_UP:]) for side in (times.between, times.bare))
    return paired_ratio(ours, bare), paired_ratio(bare[:-1:2], bare[1::2])


def _train(folder: Path, num_steps: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in alone.items()}, MASTER_ADDR="127.0.0.1")
    sections = {
        "run": {"storage": str(folder), "steps": num_steps, "report": False},
        "batch": {"global_size": 2, "microbatch_size": 2},
        "model": {"target": "tests.benchmarks.host:Many"},
        "task": {"kind": "regression"},
        "data": {"target": "tests.benchmarks.host:Numbers", "validation_fraction": 0.0},
        "schedule": {"warmup_steps": 5},
        "trackers": [],
    }
    (folder / "host.yaml").write_text(yaml.safe_dump(sections))
    sys.argv = ["steadfast", "--config", str(folder / "host.yaml")]
    if code := steadfast():
        raise SystemExit(code)


def _by_block(seconds: Sequence[float]) -> list[float]:
    """Add up the steps of each block, so that a message's steps are in one."""
    return [sum(seconds[at : at + _BLOCK]) for at in range(0, len(seconds) - _BLOCK + 1, _BLOCK)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ratio, control = measure(options.steps)
    head = ["between gate and forward / bare AdamW", "A/A", ""]
    answer = verdict(ratio, LIMIT)
    print(table([head, [str(ratio), str(control), answer]]))
    return answer == "fail"


if __name__ == "__main__":
    raise SystemExit(main())
