"""`python -m tests.benchmarks.long_runs {ledger,steps}`: what does not grow with the length of a run.

`ledger` reads a ledger of ten million lines as the end of a run does, in a process of its own; `steps` trains many
short steps and looks at the memory of the driver, the coordinator and the leader meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

from app.plan import Plan
from app.run.directory import RunDirectory
from app.run.events import Checkpoint, RunStarted
from app.run.ledger import Ledger, StepStats
from app.storage import LocalStore
from app.telemetry.goodput import goodput, read_totals
from tests.command import ROOT, SMALL, descendants

_LINES_AT_ONCE = 100_000
_LOOK_EVERY_S = 20.0
_WARM_S = 60.0  # in which what is allocated once is allocated
_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["ledger", "read", "steps"])
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    match options.what:
        case "ledger":
            ledger(options.lines)
        case "read":
            read(options.folder)
        case "steps":
            steps(options.steps)


def ledger(num_lines: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        write(Path(folder), num_lines)
        num_bytes = (Path(folder) / "steps.jsonl").stat().st_size
        print(f"{num_lines} lines, {num_bytes / 1e9:.2f} GB, written in {time.monotonic() - began:.0f} s", flush=True)
        # A process of its own, whose peak is that of the reading.
        command = [sys.executable, "-m", "tests.benchmarks.long_runs", "read", "--folder", folder]
        subprocess.run(command, check=True, cwd=ROOT)


def write(folder: Path, num_lines: int) -> None:
    """Write a ledger of two attempts by what writes it in a run, the second of which does a tenth again."""
    directory = RunDirectory(LocalStore(folder))
    plan = Plan.even(48, 8, 4)
    began_s = time.time()
    directory.record(RunStarted(time_s=began_s, launcher="ray"))
    directory.record(Checkpoint(step=5, path="step-5", seconds=0.1, blocked_s=0.0, bytes=1))
    half = num_lines // 2
    first_again = half - num_lines // 10
    for attempt, first in ((1, 1), (2, first_again)):
        writer = Ledger(directory.store, attempt, plan, writes=True)
        for start in range(first, first + half, _LINES_AT_ONCE):
            lines = []
            for step in range(start, min(start + _LINES_AT_ONCE, first + half)):
                stats = StepStats(
                    step, 2.4131834506988525 / step, 48, 1.0, 48, (step * 0x9E3779B97F4A7C15) % 2**64, True
                )
                lines.append((stats, 0.01, began_s + 0.0101 * (step + (attempt - 1) * (half - first_again))))
            writer.commit(lines)
        writer.close()


def read(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    marks = [time.monotonic()]
    totals = read_totals(RunDirectory(LocalStore(folder)), lambda: marks.append(time.monotonic()))
    found = {"samples": totals.samples, "num_lost": totals.num_lost, **goodput(totals)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    longest_s = max(new - old for old, new in pairwise(marks))
    print(f"read in {time.monotonic() - marks[0]:.1f} s, longest without progress {longest_s:.2f} s")
    print(f"RSS {before:.0f} MiB before, {peak:.0f} MiB at its peak: {peak - before:.0f} MiB more")
    print(json.dumps(found))


def steps(num_steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = [f"run.storage={folder}", "run.name=long", f"run.steps={num_steps}", "checkpoint.every=200 steps"]
        tiny = ["model={kind: mlp, layers: [64, 8, 10]}", "batch={global_size: 4, microbatch_size: 2}"]
        command = [sys.executable, "main.py", "--config", "digits.yaml", *words, *tiny, *_on_two()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": folder}
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            _watch(process, Path(folder) / "long" / "steps.jsonl", num_steps)
        finally:
            process.terminate()
            print(f"exit code {process.wait(60)}", (Path(folder) / "log").read_text()[-500:])


def _on_two() -> list[str]:
    return [word for word in SMALL if word.startswith(("scaling", "cluster", "validation"))]


def _watch(process: subprocess.Popen[bytes], ledger: Path, num_steps: int) -> None:
    """Print the resident memory of the run's processes every now and then, and what came on top since it is warm."""
    first: dict[str, float] = {}
    began = time.monotonic()
    while process.poll() is None:
        time.sleep(_LOOK_EVERY_S)
        resident = {"driver": psutil.Process(process.pid).memory_info().rss / _MIB} if process.poll() is None else {}
        number = 0
        for pid, title in descendants(process.pid):
            name = title.removeprefix("ray::").split()[0] if title.startswith("ray::") else ""
            if name.startswith(("Coordinator", "SlotWorker", "TrainController")):
                number += 1
                resident[f"{name} {number}"] = psutil.Process(pid).memory_info().rss / _MIB
        if time.monotonic() - began > _WARM_S and not first:
            first = resident
        done = ledger.read_bytes().count(b"\n") if ledger.exists() else 0
        grown = {name: f"{size:.0f} ({size - first.get(name, size):+.1f})" for name, size in resident.items()}
        print(f"{time.monotonic() - began:.0f} s, step {done} of {num_steps}: MiB {grown}", flush=True)


if __name__ == "__main__":
    main()
