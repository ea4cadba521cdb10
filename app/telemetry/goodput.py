"""What the time of a run was worth, from what was written down while it ran."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from app.ledger import History


def goodput(history: History, events: list[dict[str, Any]]) -> dict[str, float]:
    """`wall_s`: all commands together. `stall_s`: time between attempts of one command in which no step ended.
    `goodput`: time in steps that held / wall time."""
    starts = sorted(event["time_s"] for event in events if event["event"] == "run_started")
    times = sorted([event["time_s"] for event in events] + [line["time_s"] for line in history.lines])
    wall = sum(
        max(time for time in times if time < following) - start
        for start, following in zip(starts, [*starts[1:], float("inf")], strict=True)
    )
    lines = sorted(history.lines, key=lambda line: line["time_s"])
    stall = sum(
        max(0.0, new["time_s"] - new["step_s"] - old["time_s"])
        for old, new in pairwise(lines)
        if new["attempt"] != old["attempt"] and not any(old["time_s"] < s <= new["time_s"] for s in starts)
    )
    productive = sum(line["step_s"] for line in history.committed.values())
    return {
        "wall_s": round(wall, 3),
        "stall_s": round(stall, 3),
        "goodput": round(productive / wall, 4) if wall else 0.0,
    }
