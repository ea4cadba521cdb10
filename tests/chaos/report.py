"""What the lines that a contender wrote say of a fault, the table, and which claims do not hold. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from tests.chaos.matrix import Claim

Line = dict[str, Any]
_TITLES = ("fault", "contender", "steps redone", "samples lost or twice", "stall, s", "equal?", "finished?")


@dataclass(frozen=True)
class Row:
    """One contender under one fault. None is what could not be told, since it did not get so far, or was not tried.

    redone: steps run again after the fault. strayed: samples that the final weights have not seen, or seen twice.
    stall_s: the longest time without a new step, less a step's.
    finished: it went on after the fault; after the last one, to the end.
    """

    fault: str
    contender: str
    redone: int | None = None
    strayed: int | None = None
    stall_s: float | None = None
    equal: bool | None = None
    finished: bool | None = None


def measure(lines: Sequence[Line], fault_s: float, until_s: float) -> tuple[int, float]:
    """Steps redone and stall in seconds between a fault and the time at which the run had settled again.

    A line of ours that is not confirmed is a step that was done before the fault and written down after it.
    """
    newest = redone = 0
    before, after = [], [fault_s]
    for line in lines:
        is_new, newest = line["step"] > newest, max(newest, line["step"])
        if line["time_s"] <= fault_s:
            before += [line["time_s"]] * is_new
        elif line["time_s"] <= until_s:
            redone += not is_new
            after += [line["time_s"]] * (is_new and line.get("confirmed", True))
    step_s = median(new - old for old, new in pairwise(before[-20:]))
    return redone, max(
        0.0, max(new - old for old, new in pairwise([*after, *([until_s] * (len(after) == 1))])) - step_s
    )


def strayed(committed: dict[int, Line], planned: dict[int, Line], last_step: int) -> int:
    """Samples of steps up to `last_step` that are missing from, or too many in, what the final weights have seen."""
    seen, meant = (
        Counter(sample for step in range(1, last_step + 1) if step in lines for sample in _samples(lines[step]))
        for lines in (committed, planned)
    )
    return (seen - meant).total() + (meant - seen).total()


def _samples(line: Line) -> list[Any]:
    """Ids where they are written down, else the digest of all of them: a step of ours is right as a whole or wrong."""
    return line.get("ids") or [(line["step"], line["samples_digest"])] * line["num_samples"]


def broken(rows: Sequence[Row], claims: Sequence[Claim], who: str, yardstick: str) -> list[str]:
    """A sentence for every claim about `who` that does not hold; what was not measured does not."""
    found = {(row.contender, row.fault): row for row in rows}
    sentences = []
    for claim in claims:
        row = found.get((who, claim.fault), Row(claim.fault, who))
        most_s = math.inf if claim.stall_s is None else claim.stall_s
        if claim.of_torchrun is not None:
            theirs = found.get((yardstick, claim.fault), Row(claim.fault, yardstick))
            most_s = claim.of_torchrun * (math.inf if theirs.finished is False else theirs.stall_s or math.nan)
        checks = {
            f"steps redone {_shown(row.redone)}, claimed at most {claim.redone}": _within(row.redone, claim.redone),
            f"samples lost or twice {_shown(row.strayed)}, claimed none": _within(row.strayed, 0),
            f"stall {_shown(row.stall_s)} s, claimed at most {_shown(most_s)} s": _within(row.stall_s, most_s),
            "the result is not equal to an undisturbed run's": row.equal is True,
            "the run did not finish": row.finished is True,
        }
        sentences += [f"{claim.fault}: {sentence}" for sentence, holds in checks.items() if not holds]
    return sentences


def _within(value: float | None, most: float) -> bool:
    """Never of what was not measured; nor when the most is not a number, which is how the yardstick lacks."""
    return value is not None and value <= most


def table(rows: Sequence[Row], faults: Sequence[str]) -> str:
    """All contenders under a fault stand together."""
    cells: list[tuple[str, ...]] = [_TITLES]
    for fault in faults:
        for index, row in enumerate(row for row in rows if row.fault == fault):
            figures = (row.redone, row.strayed, row.stall_s, row.equal, row.finished)
            cells.append(("" if index else fault, row.contender, *map(_shown, figures)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def _shown(figure: float | bool | None) -> str:
    match figure:
        case None:
            return "-"
        case bool():
            return "yes" if figure else "no"
        case float():
            return f"{figure:.2f}"
    return str(figure)
