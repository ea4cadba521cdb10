"""What the time of a run was worth, from what was written down while it ran."""

from itertools import pairwise

from app.run.events import Event, RunStarted
from app.run.ledger import History


def goodput(history: History, events: list[Event]) -> dict[str, float]:
    """Return the seconds of a run and, as `goodput`, the share of them spent in steps that led to its result."""
    starts_s = []
    times_s = [line["time_s"] for line in history.lines]
    for event in events:
        times_s.append(event.time_s or 0.0)
        if isinstance(event, RunStarted):
            starts_s.append(event.time_s or 0.0)
    starts_s.sort()
    wall_s = _wall_s(starts_s, times_s)
    stall_s = _stall_s(starts_s, history)
    productive_s = sum(line["step_s"] for line in history.committed.values())
    return {
        "wall_s": round(wall_s, 3),
        "stall_s": round(stall_s, 3),
        "goodput": round(productive_s / wall_s, 4) if wall_s else 0.0,
    }


def _wall_s(starts_s: list[float], times_s: list[float]) -> float:
    """Return the sum over commands of the time from start to end."""
    # A command that was killed has no event of its end. What it wrote last, a step or an event, is taken for it.
    wall_s = 0.0
    for start_s, next_start_s in pairwise([*starts_s, float("inf")]):
        wall_s += max(time_s for time_s in times_s if time_s < next_start_s) - start_s
    return wall_s


def _stall_s(starts_s: list[float], history: History) -> float:
    """Return the time between attempts of one command in which no step ended."""
    stall_s = 0.0
    for old, new in pairwise(sorted(history.lines, key=lambda line: line["time_s"])):
        # The time between two commands is the user's own: the run did not exist then.
        between_commands = any(old["time_s"] < start_s <= new["time_s"] for start_s in starts_s)
        if new["attempt"] != old["attempt"] and not between_commands:
            stall_s += max(0.0, new["time_s"] - new["step_s"] - old["time_s"])
    return stall_s
