"""What the lines that a contender wrote say of a fault, the table, and which claims do not hold. Pure."""

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
    former_s: the stall of a try before, if this is another.
    slowdown: of the machine meanwhile.
    """

    fault: str
    contender: str
    redone: int | None = None
    strayed: int | None = None
    stall_s: float | None = None
    equal: bool | None = None
    finished: bool | None = None
    former_s: float | None = None
    slowdown: float = 1.0


def measure(lines: Sequence[Line], fault_s: float, until_s: float, since_s: float = 0.0) -> tuple[int, float]:
    """Steps redone and stall in seconds between a fault and the time at which the run had settled again.

    A step takes what it has taken from `since_s` on.

    A line of ours that is not confirmed is a step that was done before the fault and written down after it.
    """
    newest = redone = 0
    before, after = [], [fault_s]
    for line in lines:
        is_new, newest = line["step"] > newest, max(newest, line["step"])
        if line["time_s"] <= fault_s:
            before += [line["time_s"]] * (is_new and line["time_s"] > since_s)
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
        most_s = math.inf if claim.stall_s is None else claim.stall_s * row.slowdown
        if claim.of_torchrun is not None:
            theirs = found.get((yardstick, claim.fault), Row(claim.fault, yardstick))
            most_s = claim.of_torchrun * (math.inf if theirs.finished is False else theirs.stall_s or math.nan)
        checks = {
            f"steps redone {_shown(row.redone)}, claimed at most {claim.redone}": _within(row.redone, claim.redone),
            f"samples lost or twice {_shown(row.strayed)}, claimed none": _within(row.strayed, 0),
            f"stall {_stalls(row)} s, claimed at most {_shown(most_s)} s{_busy(claim, row)}": _within(
                _stall_s(row), most_s
            ),
            "the result is not equal to an undisturbed run's": row.equal is True,
            "the run did not finish": row.finished is True,
        }
        sentences += [f"{claim.fault}: {sentence}" for sentence, holds in checks.items() if not holds]
    return sentences


def only_stalls(sentences: Sequence[str]) -> bool:
    """Return whether nothing is wrong but how long it took, which may be the machine's doing."""
    return bool(sentences) and all(": stall " in sentence for sentence in sentences)


def _stall_s(row: Row) -> float | None:
    if row.stall_s is None or row.former_s is None:
        return row.stall_s
    return min(row.stall_s, row.former_s)


def _stalls(row: Row) -> str:
    return _shown(row.stall_s) if row.former_s is None else f"{_shown(row.former_s)} and again {_shown(row.stall_s)}"


def _busy(claim: Claim, row: Row) -> str:
    if claim.stall_s is None or row.slowdown < 1.05:
        return ""
    return f" ({_shown(claim.stall_s)} s on a machine that is not {row.slowdown:.1f} times as slow as alone)"


def _within(value: float | None, most: float) -> bool:
    """Never of what was not measured; nor when the most is not a number, which is how the yardstick lacks."""
    return value is not None and value <= most


def table(rows: Sequence[Row], faults: Sequence[str]) -> str:
    """All contenders under a fault stand together."""
    cells: list[tuple[str, ...]] = [_TITLES]
    for fault in faults:
        for index, row in enumerate(row for row in rows if row.fault == fault):
            stall = _stalls(row)
            figures = [_shown(row.redone), _shown(row.strayed), stall, _shown(row.equal), _shown(row.finished)]
            cells.append(("" if index else fault, row.contender, *figures))
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
