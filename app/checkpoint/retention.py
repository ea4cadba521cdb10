"""Which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.checkpoint.manifest import Manifest
from app.config import CheckpointConfig


def kept(config: CheckpointConfig, checkpoints: Sequence[Manifest], skip: frozenset[int]) -> set[int]:
    """The steps of the last ones, of the best one, and of every so many steps one. And while the last ones are of steps
    that were left out, the last one before: the next bad step would put the step before these under suspicion."""
    steps = sorted(each.step for each in checkpoints)
    found = set(steps[-config.keep_last :])
    if steps and steps[-1] in skip:
        suspect = max(step for step in range(steps[-1]) if step not in skip)
        found |= set([step for step in steps if step < suspect][-1:])
    if every := config.keep_every:
        found |= {step for step, before in zip(steps, [0, *steps], strict=False) if step // every > before // every}
    if best := config.keep_best:
        sign = 1 if best.mode == "min" else -1
        measured = [(sign * each.metrics.get(best.metric, math.nan), each.step) for each in checkpoints]
        comparable = [each for each in measured if not math.isnan(each[0])]
        found |= {min(comparable)[1]} if comparable else set()
    return found
