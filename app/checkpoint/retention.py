"""Which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from app.config import CheckpointConfig


class Checkpoint(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def metrics(self) -> dict[str, float]: ...


class Retention:
    """The last ones, the best one, and every so many steps one."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config

    def kept(self, checkpoints: Sequence[Checkpoint]) -> set[int]:
        """Their steps."""
        steps = sorted(each.step for each in checkpoints)
        kept = set(steps[-self._config.keep_last :])
        if every := self._config.keep_every:
            kept |= {step for step, before in zip(steps, [0, *steps], strict=False) if step // every > before // every}
        if best := self._config.keep_best:
            sign = 1 if best.mode == "min" else -1
            measured = [(sign * each.metrics.get(best.metric, math.nan), each.step) for each in checkpoints]
            comparable = [each for each in measured if not math.isnan(each[0])]
            kept |= {min(comparable)[1]} if comparable else set()
        return kept
