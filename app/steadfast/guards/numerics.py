"""Decide whether the numbers of a step are bad and how to react.

Every rank gets the same numbers in the same order (`StepStats`), so all ranks decide alike without communication.
"""

import math
from collections import deque
from collections.abc import Collection
from statistics import median
from typing import NamedTuple

from steadfast.config import RecoveryConfig
from steadfast.run.ledger import PastLosses, StepStats

# Number of losses. The window is short compared with a schedule, so the median follows the curve, and long enough to
# contain rare but ordinary losses. With 128 losses, a classifier that has almost converged raises an alarm for one hard
# sample in fifty.
_WINDOW = 512
_ENOUGH = 32  # with fewer losses the median absolute deviation (MAD) may be half of the true value
# Ten such deviations are a doubling of the loss. On a plateau the MAD is almost 0, so a lower bound is needed.
# Instabilities that heal by themselves do not double a settled loss.
_LEAST_SPREAD = math.log(2) / 10
# The largest excess of the window counts as this many deviations, because heavy tails and mixed data show in it.
_PER_OUTLIER = 5
_HORIZON = 1000  # steps over which skipped steps count against the budget; older skipped steps do not count
# Share of the first losses. A model that has memorized its data has losses near 0. With Adam at a constant rate such
# losses jump by factors of thousands, but the jumps heal by themselves and have almost no gradient.
_LEAST_LOSS = 1e-3


class BadStep(Exception):
    """Signal that the next attempt must leave out `steps`.

    The exception ends the attempt on every rank, but not the run. The next attempt begins before `steps`.
    """

    def __init__(self, steps: tuple[int, ...], cause: str) -> None:
        super().__init__(steps, cause)
        self.steps = steps
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.cause}; a new attempt leaves out step {' and '.join(map(str, self.steps))}"


class Rollback(NamedTuple):
    """Decision to return to a checkpoint before `steps` and skip `steps`."""

    steps: tuple[int, ...]
    cause: str


class Ignore(NamedTuple):
    """Decision to accept a spike because the budget is spent.

    Most spikes heal by themselves.
    """

    cause: str


class Stop(NamedTuple):
    """Decision to end the run."""

    why: str


class Numerics:
    """Judge of the steps of one attempt.

    Args:
        skip: steps that the run already leaves out.
        past: losses of the steps before the attempt.
    """

    def __init__(self, config: RecoveryConfig, skip: frozenset[int], past: PastLosses) -> None:
        self._config = config
        self._skip = skip
        self._first = past.first[:_ENOUGH]  # of the run
        self._losses = deque(past.recent, maxlen=_WINDOW)

    def judge(self, agreed: StepStats) -> Rollback | Ignore | Stop | None:
        """Return the decision for the next step, None for a good step."""
        cause = self._cause(agreed)
        if cause:
            steps = steps_to_skip(agreed.step, self._skip)
            horizon = range(agreed.step - _HORIZON + 1, agreed.step + 1)
            num_spent = len(self._skip.intersection(horizon))
            if num_spent + len(steps) <= self._config.max_skipped_steps:
                return Rollback(steps, cause)
            if not agreed.finite:
                return Stop(_remedy(agreed, num_spent))
        # The loss of a step whose targets are all masked is not finite, which is no fault.
        if math.isfinite(agreed.loss):
            self._losses.append(agreed.loss)
            if len(self._first) < _ENOUGH:
                self._first.append(agreed.loss)
        return Ignore(cause) if cause else None

    def _cause(self, agreed: StepStats) -> str | None:
        if not agreed.finite:
            return f"loss {agreed.loss:.4g}, gradient norm {agreed.grad_norm:.4g} at step {agreed.step}"
        if self._config.spike is None or not is_spike(agreed.loss, self._losses, self._config.spike, self._least()):
            return None
        return f"loss {agreed.loss:.4g} against a median of {median(self._losses):.4g} at step {agreed.step}"

    def _least(self) -> float:
        """Return the loss up to which no loss counts as a spike."""
        if not self._first:
            return 0.0
        return _LEAST_LOSS * median(map(abs, self._first))


def is_spike(loss: float, recent: Collection[float], most: float, least: float = 0.0) -> bool:
    """Return whether `loss` is a spike compared with `recent` losses.

    A spike is above all recent losses, and more than `most` robust deviations above their median. Losses from 0 to
    `least` count as equal.
    """
    if len(recent) < _ENOUGH or not loss > max(recent):
        return False
    losses = list(recent)
    lowest = min(losses)
    # Losses vary by factors. In logarithms the same deviation fits a falling curve, a plateau and a loss near 0.
    if lowest > 0 or (lowest == 0 and least > 0):
        losses = [math.log(max(each, least)) for each in losses]
        loss = math.log(max(loss, least))
        least_spread = _LEAST_SPREAD
    else:
        # Losses that may be negative or zero have no logarithm, so the plain losses are compared. The least deviation
        # is then proportional to the largest loss.
        least_spread = _LEAST_SPREAD * max(max(losses), -lowest, least)
    # Robust statistics prevent outliers from hiding each other: the median replaces the mean, and 1.4826 times the
    # median absolute deviation replaces the standard deviation (Iglewicz and Hoaglin, How to Detect and Handle
    # Outliers, 1993).
    middle = median(losses)
    spread = 1.4826 * median(abs(each - middle) for each in losses)
    return loss - middle > most * max(spread, least_spread, (max(losses) - middle) / _PER_OUTLIER)


def steps_to_skip(step: int, skip: frozenset[int]) -> tuple[int, ...]:
    """Return the steps to leave out because of a bad one."""
    before = step - 1
    while before in skip:
        before -= 1
    # The run already left out the steps just before this one, and the step is still bad. So the last update before the
    # skipped steps did the harm.
    return (before, step) if 0 < before < step - 1 else (step,)


def _remedy(agreed: StepStats, num_spent: int) -> str:
    tried = ""
    if num_spent:
        tried = f" ({num_spent} steps are left out already; recovery.max_skipped_steps allows no more)"
    return (
        f"step {agreed.step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}: not finite{tried}. "
        "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data of this step"
    )
