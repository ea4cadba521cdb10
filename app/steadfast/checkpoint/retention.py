"""Decide which checkpoints to keep."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from steadfast.checkpoint.manifest import Manifest
from steadfast.config import CheckpointConfig


def steps_to_keep(config: CheckpointConfig, checkpoints: Sequence[Manifest], skip: frozenset[int]) -> set[int]:
    """Return the steps of checkpoints to keep: last, best and periodic ones."""
    steps = sorted(each.step for each in checkpoints)
    keep = set(steps[-config.keep_last :])
    if steps and steps[-1] in skip:
        # If the next step is bad too, the last step that was not skipped becomes suspect, and the run returns to a
        # checkpoint before that step.
        suspect = steps[-1]
        while suspect in skip:
            suspect -= 1
        older = steps[: bisect_left(steps, suspect)]
        keep.update(older[-1:])
    if config.keep_every:
        # Checkpoints come at any step, such as by the clock, so the first one from each multiple on is kept.
        for before, step in pairwise([0, *steps]):
            if step // config.keep_every > before // config.keep_every:
                keep.add(step)
    if config.keep_best:
        sign = 1 if config.keep_best.mode == "min" else -1
        candidates = []
        for each in checkpoints:
            value = each.metrics.get(config.keep_best.metric, math.nan)
            # A comparison with NaN is always false, so a NaN could count as the best value.
            if not math.isnan(value):
                candidates.append((sign * value, each.step))
        if candidates:
            keep.add(min(candidates)[1])
    return keep
