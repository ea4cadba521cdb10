"""What is wrong with the numbers of a step, and what follows from it.

Every rank is given the same numbers in the same order (`StepStats`), so all decide alike without asking each other.
"""

import math
from collections import deque
from collections.abc import Collection
from statistics import median
from typing import NamedTuple

from app.config import RecoveryConfig
from app.run.ledger import PastLosses, StepStats

# Losses: short beside a schedule, so the median follows the curve, and long enough to hold what is rare but ordinary.
# With 128, a classifier that has nearly nothing left to learn raises an alarm for one hard sample in fifty.
_WINDOW = 512
_ENOUGH = 32  # below it a MAD may be half of what it should be
# Ten such deviations are a doubling. A plateau has a MAD of almost nothing, and real instabilities that heal by
# themselves do not double a loss that has settled.
_LEAST_SPREAD = math.log(2) / 10
_PER_OUTLIER = 5  # the largest excess of the window counts as so many deviations: heavy tails and mixed data show there
_HORIZON = 1000  # steps in which the budget is spent; those before are forgiven
# As a share of the first losses. A model that has learnt its data by heart has losses of almost nothing, and Adam at a
# constant rate lets them bump by factors of thousands, which heal by themselves and have next to no gradient.
_LEAST_LOSS = 1e-3


class BadStep(Exception):
    """Ends the attempt on every rank alike, not the run: the next one begins before `steps` and leaves them out."""

    def __init__(self, steps: tuple[int, ...], cause: str) -> None:
        super().__init__(steps, cause)
        self.steps = steps
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.cause}; a new attempt leaves out step {' and '.join(map(str, self.steps))}"


class Rollback(NamedTuple):
    """A decision: go back to a checkpoint before all of `steps`, and leave them out."""

    steps: tuple[int, ...]
    cause: str


class Ignore(NamedTuple):
    """A decision: let a spike pass that there is no budget for. Most spikes heal by themselves."""

    cause: str


class Stop(NamedTuple):
    """A decision: end the run."""

    why: str


class Numerics:
    """Judges the steps of an attempt. `skip` are left out already; `past` are the losses before it."""

    def __init__(self, config: RecoveryConfig, skip: frozenset[int], past: PastLosses) -> None:
        self._config = config
        self._skip = skip
        self._first = past.first[:_ENOUGH]  # of the run
        self._losses = deque(past.recent, maxlen=_WINDOW)

    def judge(self, agreed: StepStats) -> Rollback | Ignore | Stop | None:
        """Return what follows from the next step, None if nothing is wrong with it."""
        cause = self._cause(agreed)
        if cause:
            steps = steps_to_skip(agreed.step, self._skip)
            num_spent = sum(agreed.step - _HORIZON < each <= agreed.step for each in self._skip)
            if num_spent + len(steps) <= self._config.max_skipped_steps:
                return Rollback(steps, cause)
            if not agreed.finite:
                return Stop(_remedy(agreed, num_spent))
        # A loss is not finite where everything in a step is masked, which is no fault.
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
        """Return the size of a loss up to which no loss is a spike."""
        if not self._first:
            return 0.0
        return _LEAST_LOSS * median(abs(each) for each in self._first)


def is_spike(loss: float, recent: Collection[float], most: float, least: float = 0.0) -> bool:
    """Return whether `loss` lies above all `recent` losses, and over `most` robust deviations above their median.

    Losses from 0 to `least` are all the same.
    """
    if len(recent) < _ENOUGH or not loss > max(recent):
        return False
    losses = list(recent)
    lowest = min(losses)
    # Losses spread by factors. In logarithms a falling curve, a plateau and a loss of almost nothing are alike.
    if lowest > 0 or (lowest == 0 and least > 0):
        losses = [math.log(max(each, least)) for each in losses]
        loss = math.log(max(loss, least))
        least_spread = _LEAST_SPREAD
    else:
        # Losses that may be negative or zero have no logarithm. They are taken as they are, in units of the largest.
        least_spread = _LEAST_SPREAD * max(max(losses), -lowest, least)
    # Robust, so that outliers do not hide each other: median and 1.4826 times the median absolute deviation in place
    # of mean and standard deviation (Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993).
    middle = median(losses)
    spread = 1.4826 * median(abs(each - middle) for each in losses)
    return loss - middle > most * max(spread, least_spread, (max(losses) - middle) / _PER_OUTLIER)


def steps_to_skip(step: int, skip: frozenset[int]) -> tuple[int, ...]:
    """Return the steps to leave out because of a bad one."""
    before = step - 1
    while before in skip:
        before -= 1
    # Leaving out the steps right before this one has not helped. So the harm was done by the last update before these.
    return (before, step) if 0 < before < step - 1 else (step,)


def _remedy(agreed: StepStats, num_spent: int) -> str:
    tried = ""
    if num_spent:
        tried = f" ({num_spent} steps are left out already; recovery.max_skipped_steps allows no more)"
    return (
        f"step {agreed.step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}: not finite{tried}. "
        "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data of this step"
    )
