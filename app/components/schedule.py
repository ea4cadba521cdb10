"""Learning rate schedules: pure functions of the step, so they have no state to save."""

import math
from collections.abc import Callable
from functools import partial

from app.config import CosineConfig, ScheduleConfig, Target
from app.config.target import load_target

Schedule = Callable[[int, float], float]  # (step, counted from 1, and peak rate of a parameter group) -> rate


def build_schedule(config: ScheduleConfig, num_steps: int) -> Schedule:
    """Return the schedule that the configuration names, for a run of `num_steps`."""
    if not isinstance(config, Target):
        return lambda step, peak: learning_rate(config, peak, step, num_steps)
    factor = partial(load_target(config.target, "schedule.target"), num_steps=num_steps, **config.args)
    return lambda step, peak: peak * factor(step)


def warmup_in_force(config: ScheduleConfig, num_steps: int) -> int:
    """Return the steps of warm-up that a run of `num_steps` really has: a longer warm-up ends with the run."""
    # Not corrected in the configuration: a short run that is extended gets the warm-up that the user asked for.
    if isinstance(config, Target):
        return 0
    return min(config.warmup_steps, num_steps)


def learning_rate(config: ScheduleConfig, peak: float, step: int, num_steps: int) -> float:
    """Return the rate of `step` (from 1): linear warm-up to `peak`, then constant or a cosine down to its floor."""
    assert not isinstance(config, Target)
    warmup_steps = warmup_in_force(config, num_steps)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if not isinstance(config, CosineConfig):
        return peak
    floor = peak * config.min_lr_fraction
    # Of the run's present length: extending a finished run stretches the cosine, so that its rate goes up once more.
    done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
