"""Seconds from the command to the end of the first step: this app under Ray, and the peer.

python -m tests.benchmarks.startup --pairs 5

One round starts both once, one after the other; the order is reversed from round to round. Beside the seconds stand
the CPU seconds that all processes of a command burnt until then, which another user of the machine disturbs far less.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from tests.benchmarks.commands import Running, app_under_ray, parser_of_pairs, peer, write_config
from tests.benchmarks.statistics import paired_ratio, table

SIDES = ("app, ray", "peer, torchrun")
# Phases of Ray's start, each ended by the first process with such a title.
RAY_PHASES = {
    "imports": "gcs_server",  # of the command, until it starts Ray
    "ray": "raylet/raylet",  # the head's services
    "coordinator": "ray::Coordinator",
    "controller": "SlotController",
    "workers": "ray::SlotWorker",
}
APP_PHASES = ("formed", "built", "restored", "first_step")
_START_S, _POLL_S = 300.0, 0.1


@dataclass
class Start:
    """One start. `phases`: seconds by name, in order."""

    ready_s: float = 0.0
    cpu_s: float = 0.0
    num_processes: int = 0
    phases: dict[str, float] = field(default_factory=dict)


def start(side: str, folder: Path) -> Start:
    config = write_config(
        folder / "startup.yaml",
        run={"storage": str(folder), "steps": 2},
        schedule={"kind": "cosine", "warmup_steps": 1},
    )
    events, first_step = folder / "startup" / "events.jsonl", folder / "first_step"
    command, first_step_at = {
        "app, ray": (app_under_ray(config), lambda: _started(events).get("time_s")),
        "peer, torchrun": (peer(config, first_step=first_step), lambda: _number(first_step)),
    }[side]
    began = time.time()
    with Running(side, command, folder / "log") as running:
        found, seen = _watch(running, began, first_step_at)
        if started := _started(events):
            found.phases = _phases(started, seen, found.ready_s)
    return found


def _watch(running: Running, began: float, first_step_at: Callable[[], float | None]) -> tuple[Start, dict[str, float]]:
    """Until the first step has ended. Also returns when the process that ends each of Ray's phases was seen."""
    seen: dict[str, float] = {}
    cpu_s: dict[int, float] = {}  # what has ended meanwhile stays counted
    while time.time() - began < _START_S:
        for pid, title, seconds in _family(running.process.pid):
            cpu_s[pid] = seconds
            for phase, mark in RAY_PHASES.items():
                if phase not in seen and mark in title:
                    seen[phase] = time.time() - began
        if ended := first_step_at():
            return Start(ended - began, sum(cpu_s.values()), len(cpu_s)), seen
        running.check()
        time.sleep(_POLL_S)
    raise TimeoutError(f"{running.name}: no first step within {_START_S:g} s")


def _family(pid: int) -> Iterator[tuple[int, str, float]]:
    """Yield pid, title and CPU seconds of a process and of all that descend from it, but of those that have ended."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            yield process.pid, " ".join(process.cmdline()), times.user + times.system


def _phases(started: dict[str, float], seen: dict[str, float], ready_s: float) -> dict[str, float]:
    phases: dict[str, float] = {}
    until = 0.0
    for phase in sorted(seen, key=lambda name: seen[name]):
        phases[phase], until = seen[phase] - until, seen[phase]
    own = {phase: started[f"{phase}_s"] for phase in APP_PHASES}
    return {**phases, "worker imports": ready_s - until - sum(own.values()), **own}


def _started(events: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    return next((line for line in lines if line["event"] == "attempt_started"), {})


def _number(path: Path) -> float | None:
    text = path.read_text() if path.exists() else ""
    return float(text) if text else None


def main() -> None:
    options = parser_of_pairs(5).parse_args()
    starts: dict[str, list[Start]] = {side: [] for side in SIDES}
    for number in range(options.pairs):
        for side in SIDES if number % 2 else SIDES[::-1]:
            with tempfile.TemporaryDirectory(prefix="startup-") as folder:
                starts[side].append(found := start(side, Path(folder)))
            print(f"{number + 1}/{options.pairs} {side}: {found.ready_s:.1f} s, {found.cpu_s:.1f} CPU s", flush=True)

    rows = [["", "first step after s", "CPU s", "processes", "ratio to the last row"]]
    for side in SIDES:
        mine, last = starts[side], starts[SIDES[-1]]
        ratio = paired_ratio([each.ready_s for each in mine], [each.ready_s for each in last])
        figures = [f"{median(each.ready_s for each in mine):.1f}", f"{median(each.cpu_s for each in mine):.1f}"]
        rows.append([side, *figures, f"{median(each.num_processes for each in mine):.0f}", str(ratio)])
    print(table(rows))
    ours = starts[SIDES[0]]
    medians = {name: median(each.phases.get(name, 0.0) for each in ours) for name in ours[0].phases}
    print("phases: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in medians.items()))


if __name__ == "__main__":
    main()
