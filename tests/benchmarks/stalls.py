"""Time in which no rank makes progress, from the ledger."""

from itertools import pairwise
from typing import Any

Lines = list[dict[str, Any]]


def between_worlds(lines: Lines) -> list[float]:
    """Seconds between the last step of each world and the beginning of the first one of the next."""
    ordered = sorted(lines, key=lambda line: line["time_s"])
    pairs = [(old, new) for old, new in pairwise(ordered) if new["attempt"] != old["attempt"]]
    return [max(0.0, new["time_s"] - new["step_s"] - old["time_s"]) for old, new in pairs]


def into(lines: Lines, attempt: int) -> float:
    """The same for one world, by the number of its attempt."""
    ordered = sorted(lines, key=lambda line: line["time_s"])
    old, new = next((old, new) for old, new in pairwise(ordered) if old["attempt"] < attempt == new["attempt"])
    return max(0.0, float(new["time_s"] - new["step_s"] - old["time_s"]))


def first_step_after(lines: Lines, moment_s: float, attempt: int) -> float:
    """Seconds from a moment (Unix time) to the end of the first step of the world with this number, or a later one."""
    return float(min(line["time_s"] for line in lines if line["attempt"] >= attempt) - moment_s)
