"""Seconds lost when nodes are drained, added, lost and fall silent, on real raylets of one machine.

python -m tests.benchmarks.nodes --rounds 5

Each round does to one run of two nodes: drain one; add one; lose one (its processes are killed); add one; stop one
worker (SIGSTOP: nothing closes); let it be replaced. Limits are those that the project promises.
"""

import argparse
import os
import signal
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.statistics import table
from tests.support.bed import Bed
from tests.support.checks import check_stopped
from tests.support.command import Command, Running, descendants

_SILENCE_S = 2.0
_DRAIN_S = 15.0
_LIMITS = f"recovery={{silence_s: {_SILENCE_S}, hang_limit_s: {_SILENCE_S}}}"
_WORDS = [
    "run.steps=10000000",
    "scaling.num_workers=[1,2]",
    _LIMITS,
    "trackers=[]",
]
LIMITS = {
    "drain: left before the deadline by, s": None,
    "drain: survivors' gap, s": 0.5,
    "growth: survivors' gap, s": 0.5,
    "node loss: sockets' death to next step, s": 1.0,
    "silence: last sign of life to next step, s": _SILENCE_S + 0.5,
}


def measure(rounds: int, folder: Path) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {name: [] for name in LIMITS}
    with Bed(num_nodes=2) as bed:
        running = Command(folder).start(*_WORDS, f"cluster.address={bed.address}")
        started = _next(running, 0, world_size=2)
        nodes = list(bed.nodes)
        for _ in range(rounds):
            drained = nodes.pop(0)
            deadline_s = bed.drain(drained, _DRAIN_S)
            started = _next(running, started, world_size=1)
            figures["drain: left before the deadline by, s"].append(deadline_s - _last(running)["time_s"])
            figures["drain: survivors' gap, s"].append(_gap(running.history.lines, started))
            bed.lose(drained)
            started = _grown(bed, nodes, running, started, figures)

            lost = nodes.pop(0)
            going_s = time.time()
            bed.lose(lost)
            started = _next(running, started, world_size=1)
            died_s = next(e["time_s"] for e in running.events if e["event"] == "failure" and e["time_s"] > going_s)
            after = _first_step_after(running.history.lines, died_s, started)
            figures["node loss: sockets' death to next step, s"].append(after)
            started = _grown(bed, nodes, running, started, figures)

            silent = max(pid for pid, title in descendants(os.getpid()) if "SlotWorker" in title)
            os.kill(silent, signal.SIGSTOP)
            stopped_s = time.time()
            started = _next(running, started, world_size=1)
            after = _first_step_after(running.history.lines, stopped_s, started)
            figures["silence: last sign of life to next step, s"].append(after)
            started = _next(running, started, world_size=2)
            figures["growth: survivors' gap, s"].append(_gap(running.history.lines, started))
        check_stopped(running)
    return figures


def _grown(bed: Bed, nodes: list[str], running: Running, started: int, figures: dict[str, list[float]]) -> int:
    nodes.append(bed.add())
    started = _next(running, started, world_size=2)
    figures["growth: survivors' gap, s"].append(_gap(running.history.lines, started))
    return started


def _next(running: Running, attempt: int, world_size: int) -> int:
    """Waits for a later attempt of that size to train. Returns its number."""
    running.wait_until(
        lambda: (
            bool(running.history.lines)
            and _last(running)["attempt"] > attempt
            and _last(running)["world_size"] == world_size
        ),
        f"a world of {world_size} after attempt {attempt}",
    )
    return int(_last(running)["attempt"])


def _last(running: Running) -> dict[str, Any]:
    return running.history.lines[-1]


def _gap(lines: list[dict[str, Any]], attempt: int) -> float:
    """Return the seconds in which no rank makes progress before the first step of an attempt."""
    ordered = sorted(lines, key=lambda line: line["time_s"])
    old, new = next((old, new) for old, new in pairwise(ordered) if old["attempt"] < attempt == new["attempt"])
    return max(0.0, float(new["time_s"] - new["step_s"] - old["time_s"]))


def _first_step_after(lines: list[dict[str, Any]], moment_s: float, attempt: int) -> float:
    """Return the seconds from a Unix time to the end of the first step of an attempt, or of a later one."""
    return float(min(line["time_s"] for line in lines if line["attempt"] >= attempt) - moment_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        figures = measure(parser.parse_args().rounds, Path(folder))
    rows = [["what", "median", "worst", "limit", "all"]]
    for name, values in figures.items():
        limit = "" if LIMITS[name] is None else f"{LIMITS[name]:g}"
        worst = min(values) if LIMITS[name] is None else max(values)
        rows.append([name, f"{median(values):.3f}", f"{worst:.3f}", limit, " ".join(f"{v:.2f}" for v in values)])
    print(table(rows))
    print("0 steps were done twice, and every step is committed with the samples that the seed puts there")


if __name__ == "__main__":
    main()
