"""Paired comparison on a noisy machine: the median ratio, and an interval that assumes nothing about the noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import median


@dataclass(frozen=True)
class Estimate:
    """A median with its interval; `coverage` is what the interval is sure of, less than asked where pairs are few."""

    median: float
    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        sure = "" if self.coverage >= 0.95 else f" ({self.coverage:.0%})"
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]{sure}"


def estimate(values: Sequence[float], coverage: float = 0.95) -> Estimate:
    """Inverts the sign test: the k-th smallest and k-th largest value, with the largest k whose interval covers the
    median at least as surely as asked (Conover, Practical Nonparametric Statistics, 3.2)."""
    ordered, n = sorted(values), len(values)
    if not n:
        raise ValueError("no values to estimate from")
    k, missed = 1, 2 / 2**n  # missed: the chance that the median lies outside
    while k < (n + 1) // 2 and missed + 2 * comb(n, k) / 2**n <= 1 - coverage:
        missed += 2 * comb(n, k) / 2**n
        k += 1
    return Estimate(median(ordered), ordered[k - 1], ordered[-k], 1 - missed)


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], coverage: float = 0.95) -> Estimate:
    """Of ours/theirs, pair by pair, so that what slows both of a pair cancels. With the same contender on both sides
    this is the A/A control: its distance from 1 is what the method cannot see."""
    return estimate([a / b for a, b in zip(ours, theirs, strict=True)], coverage)


def verdict(ratio: Estimate, limit: float) -> str:
    """`pass` when the interval reaches down to the limit; says so when all of it lies there."""
    if ratio.low > limit:
        return "fail"
    return "pass, whole interval" if ratio.high <= limit else "pass"


def compare_sides(seconds: Mapping[str, Sequence[float]], num_steps: int, limit: float) -> list[str]:
    """Return milliseconds a step of two sides, their ratio, A/A and the verdict, as cells.

    Args:
        seconds: of each turn, for three sides: ours, theirs, and theirs again for the A/A control.
        num_steps: of a turn.
        limit: of the ratio.
    """
    ours, theirs, control = seconds.values()
    ratio = paired_ratio(ours, theirs)
    step_ms = [f"{1e3 * median(side) / num_steps:.1f}" for side in (ours, theirs)]
    return [*step_ms, str(ratio), str(paired_ratio(theirs, control)), verdict(ratio, limit)]


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
