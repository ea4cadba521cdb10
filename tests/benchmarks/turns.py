"""Taking turns: process groups that live side by side run blocks of steps one after the other, never together.

Everything goes through files of one folder: `turn` says whose block it is ("ours 7"), and every rank appends a line
to `{side}-{rank}` when it has ended one. A rank asks at the first microbatch of each step; between two of these lies
one whole step, whoever wrote the loop, so both sides are measured between the same two points.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn

from steadfast.tasks import LanguageModeling, Sums

_POLL_S = 0.002
_START_S, _TURN_S = 300.0, 120.0  # longest first turn, and longest other one


class Turns:
    """One rank's side of it.

    Args:
        steps_per_block: steps between two hand-overs. Block 0 warms up and is not counted.
        num_blocks: after so many blocks, the warm-up included, this side runs on without asking.
    """

    def __init__(self, folder: str, side: str, rank: int, steps_per_block: int, num_blocks: int) -> None:
        self._folder, self._side, self._rank = Path(folder), side, rank
        self._steps_per_block, self._num_blocks = steps_per_block, num_blocks
        self._began = 0.0
        self._step = 0

    def step_begins(self) -> None:
        """Called when the data of a step's first microbatch is there."""
        block, within = divmod(self._step, self._steps_per_block)
        self._step += 1
        if within or block > self._num_blocks:
            return
        if block:
            self._report(time.monotonic())
        if block < self._num_blocks:
            self._wait_for(f"{self._side} {block}")
            self._began = time.monotonic()

    def _report(self, ended: float) -> None:
        with open(self._folder / f"{self._side}-{self._rank}", "a") as file:
            file.write(json.dumps([self._began, ended]) + "\n")

    def _wait_for(self, turn: str) -> None:
        while read_text(self._folder / "turn") != turn:
            time.sleep(_POLL_S)


class TurnTakingTask(LanguageModeling):
    """The app's own language modelling, made to wait for its turn: the app is measured as it is.

    Args:
        num_forwards: microbatches of one rank in one step.
        num_before: steps that it runs without asking, before its first block.
    """

    def __init__(
        self,
        folder: str,
        num_forwards: int,
        steps_per_block: int,
        num_blocks: int,
        side: str = "ours",
        num_before: int = 0,
    ) -> None:
        self._turns: Turns | None = None
        self._build: Callable[[int], Turns] = lambda rank: Turns(folder, side, rank, steps_per_block, num_blocks)
        self._num_forwards, self._num_calls = num_forwards, -num_before * num_forwards

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        if model.training and len(batch[0]) > 1:  # neither the check of the task nor the warm-up before the first step
            self._turns = self._turns or self._build(dist.get_rank())
            if self._num_calls >= 0 and self._num_calls % self._num_forwards == 0:
                self._turns.step_begins()
            self._num_calls += 1
        return super().loss(model, batch)


def give_turn(
    folder: Path, side: str, block: int, num_ranks: int, timeout_s: float, still_alive: Callable[[], None]
) -> float:
    """Lets one side run a block. Returns its seconds: from its first rank's start to its last rank's end.

    Raises:
        TimeoutError: it has not ended in time.
    """
    write_text(folder / "turn", f"{side} {block}")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        reports = [read_text(folder / f"{side}-{rank}").split("\n")[:-1] for rank in range(num_ranks)]
        if all(len(report) > block for report in reports):
            times = [json.loads(report[block]) for report in reports]
            return float(max(ended for _, ended in times) - min(began for began, _ in times))
        still_alive()
        time.sleep(0.02)
    raise TimeoutError(f"{side} did not end block {block} within {timeout_s:g} s")


def take_blocks(
    sides: Sequence[str], num_blocks: int, folder: Path, num_ranks: int, still_alive: Callable[[], None]
) -> dict[str, list[float]]:
    """Let sides run blocks in turns, every other round in reversed order. Return the seconds of all but each first."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for block in range(num_blocks):
        for side in sides if block % 2 else sides[::-1]:
            took = give_turn(folder, side, block, num_ranks, _TURN_S if block else _START_S, still_alive)
            if block:
                seconds[side].append(took)
    return seconds


def read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def write_text(path: Path, text: str) -> None:
    """Whole or not at all: its readers do not wait."""
    (part := path.with_suffix(".part")).write_text(text)
    os.replace(part, path)
