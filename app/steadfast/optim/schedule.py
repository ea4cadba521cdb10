"""Learning rate schedules as pure functions of the step, without state."""

import math
from collections.abc import Callable
from functools import partial

from steadfast.config import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    OneCycleConfig,
    ScheduleConfig,
    StepConfig,
    Target,
    WsdConfig,
)
from steadfast.config.target import load_section

Schedule = Callable[[int, float], float]  # (step, counted from 1, and peak rate of a parameter group) -> rate


def build_schedule(config: ScheduleConfig, num_steps: int) -> Schedule:
    """Return the configured schedule for a run of `num_steps`."""
    if not isinstance(config, Target):
        return lambda step, peak: learning_rate(config, peak, step, num_steps)
    factor = partial(load_section(config, "schedule"), num_steps=num_steps, **config.args)
    return lambda step, peak: peak * factor(step)


def warmup_in_force(config: ScheduleConfig, num_steps: int) -> int:
    """Return the number of warm-up steps, at most `num_steps`."""
    # The configuration keeps the longer warm-up, because a short run may be extended and then needs all of it.
    return min(getattr(config, "warmup_steps", 0), num_steps)


def learning_rate(config: ScheduleConfig, peak: float, step: int, num_steps: int) -> float:
    """Return the rate of `step` (from 1) by the configured schedule.

    The rate rises linearly to `peak` during the warm-up and then follows the kind of schedule. The schedule covers the
    run's present length: extending a finished run stretches the schedule, so its rate goes up again.
    """
    warmup_steps = warmup_in_force(config, num_steps)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))  # share of the steps after the warm-up
    match config:
        case ConstantConfig():
            return peak
        case CosineConfig():
            return _cosine(peak, peak * config.min_lr_fraction, done)
        case LinearConfig():
            return _linear(peak, peak * config.min_lr_fraction, done)
        case WsdConfig():
            num_decaying = max(1.0, config.decay_fraction * num_steps)
            decayed = (step - (num_steps - num_decaying)) / num_decaying
            return _linear(peak, peak * config.min_lr_fraction, min(1.0, max(0.0, decayed)))
        case StepConfig():
            return float(peak * config.gamma ** ((step - 1) // config.every_steps))
        case OneCycleConfig():
            return _one_cycle(peak, step, num_steps)
    raise TypeError(type(config))


def _one_cycle(peak: float, step: int, num_steps: int) -> float:
    """Return the rate of torch's OneCycleLR, which counts steps from 0."""
    start = peak / 25
    last_rising = 0.3 * num_steps - 1
    at = step - 1
    if at <= last_rising:
        return _cosine(start, peak, at / last_rising)
    return _cosine(peak, start / 1e4, min(1.0, (at - last_rising) / (num_steps - 1 - last_rising)))


def _linear(first: float, last: float, done: float) -> float:
    return first + (last - first) * done


def _cosine(first: float, last: float, done: float) -> float:
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * done))
