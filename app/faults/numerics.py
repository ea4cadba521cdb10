"""What is wrong with the numbers of a step, and what follows from it.

Pure: every rank is told the same numbers in the same order (`Agreed`), so every rank decides alike and none has to ask.

A spike is told by a robust rule, so that the outliers it looks for do not hide each other (Iglewicz and Hoaglin, How to
Detect and Handle Outliers, 1993: median and 1.4826 times the median absolute deviation in place of mean and standard
deviation). Losses spread by factors, so the rule looks at their logarithms: a falling curve, a plateau and a loss that
is almost nothing then differ in nothing but their spread. Only what lies above can be a spike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import torch

from app.agree import Agreed
from app.config import RecoveryConfig
from app.step import StepResult

# Losses: short beside a schedule, so the median follows the curve, and long enough to hold what is rare but ordinary.
# With 128, a classifier that has nearly nothing left to learn raises an alarm for one hard sample in fifty.
WINDOW = 512
_ENOUGH = 32  # below it a MAD may be half of what it should be
# Ten such deviations are a doubling. A plateau has a MAD of almost nothing, and real instabilities that heal by
# themselves do not double a loss that has settled.
_LEAST_SPREAD = math.log(2) / 10
_PER_OUTLIER = 5  # the largest excess of the window counts as so many deviations: heavy tails and mixed data show there
_HORIZON = 1000  # steps in which the budget is spent; those before are forgiven


class BadStep(Exception):
    """Ends the attempt, not the run: the next one begins before `steps`, and leaves them out. On every rank alike."""

    def __init__(self, steps: tuple[int, ...], cause: str) -> None:
        super().__init__(steps, cause)
        self.steps, self.cause = steps, cause

    def __str__(self) -> str:
        return f"{self.cause}; a new attempt leaves out step {' and '.join(map(str, self.steps))}"


@dataclass(frozen=True)
class Rollback:
    """Back to a checkpoint that lies before all of `steps`, which are left out from now on."""

    steps: tuple[int, ...]
    cause: str


@dataclass(frozen=True)
class Ignore:
    """A spike that there is no budget for: most of them heal by themselves."""

    cause: str


@dataclass(frozen=True)
class Stop:
    why: str


class Numerics:
    """The losses of an attempt, watched.

    Args:
        skip: the steps that are left out already.
        losses: of the steps before this attempt, oldest first.
    """

    def __init__(self, config: RecoveryConfig, skip: frozenset[int], losses: Iterable[float]) -> None:
        self._config, self._skip = config, skip
        self._losses = deque(losses, maxlen=WINDOW)

    def judge(self, agreed: Agreed) -> Rollback | Ignore | Stop | None:
        """What follows from a step, told in order; None if nothing."""
        cause = self._not_finite(agreed) or self._spike(agreed)
        if cause:
            steps = suspects(agreed.step, self._skip)
            spent = sum(agreed.step - _HORIZON < each <= agreed.step for each in self._skip)
            if spent + len(steps) <= self._config.max_skipped_steps:
                return Rollback(steps, cause)
            if not agreed.finite:
                return Stop(_remedy(agreed, spent))
        if math.isfinite(agreed.loss):  # it is not where everything in a step is masked
            self._losses.append(agreed.loss)
        return Ignore(cause) if cause else None

    def _not_finite(self, agreed: Agreed) -> str | None:
        if agreed.finite:
            return None
        return f"loss {agreed.loss:.4g}, gradient norm {agreed.grad_norm:.4g} at step {agreed.step}"

    def _spike(self, agreed: Agreed) -> str | None:
        if self._config.spike is None or not is_spike(agreed.loss, self._losses, self._config.spike):
            return None
        return f"loss {agreed.loss:.4g} against a median of {median(self._losses):.4g} at step {agreed.step}"


def is_spike(loss: float, recent: Iterable[float], most: float) -> bool:
    """Whether `loss` lies more than `most` robust deviations above the median of `recent` losses, and above them all.

    Where a loss may be negative or zero it is taken as it is, and the least spread follows from the largest of them.
    """
    losses = list(recent)
    if len(losses) < _ENOUGH or not loss > max(losses):
        return False
    least = _LEAST_SPREAD * max(map(abs, losses))
    if min(losses) > 0:
        loss, losses, least = math.log(loss), list(map(math.log, losses)), _LEAST_SPREAD
    middle = median(losses)
    spread = 1.4826 * median(abs(each - middle) for each in losses)
    return loss - middle > most * max(spread, least, (max(losses) - middle) / _PER_OUTLIER)


def suspects(step: int, skip: frozenset[int]) -> tuple[int, ...]:
    """`step`; and where it comes right after steps that are left out already, also the last one before these: it was
    its update, then, that did the harm."""
    before = step - 1
    while before in skip:
        before -= 1
    return (before, step) if 0 < before < step - 1 else (step,)


def left_out(step: int, *_: object) -> StepResult:
    """In place of `Stepper.step`: nothing is done."""
    return StepResult(step, torch.zeros(3, dtype=torch.float64), num_samples=0, samples_digest=0)


def _remedy(agreed: Agreed, spent: int) -> str:
    tried = f" ({spent} steps are left out already; recovery.max_skipped_steps allows no more)" if spent else ""
    return (
        f"step {agreed.step}: loss {agreed.loss}, gradient norm {agreed.grad_norm}: not finite{tried}. "
        "Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the data of this step"
    )
