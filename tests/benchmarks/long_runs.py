"""`python -m tests.benchmarks.long_runs {ledger,steps}`: what does not grow with the length of a run.

`ledger` reads a ledger of ten million lines as the end of a run does, in a process of its own; `steps` trains many
short steps and looks at the memory of the driver, the coordinator and the leader meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import psutil

from steadfast.plan import Plan
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import RunStarted
from steadfast.run.ledger import Ledger, StepStats, StepTimes
from steadfast.storage import LocalStore
from steadfast.storage.jsonl import last_lines
from steadfast.telemetry.goodput import goodput, read_totals
from tests.support.command import ROOT, descendants

_LINES_AT_ONCE = 100_000
_LOOK_EVERY_S = 20.0
_WARM_S = 60.0  # in which what is allocated once is allocated
_MIB = 2**20
_TWO_WORKERS = ["scaling.num_workers=2", "cluster.address=local", "validation.every=null"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["ledger", "read", "steps"])
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--log-every", type=int, default=50, help="steps between two log lines of `steps`")
    parser.add_argument("--checkpoint-every", type=int, default=500, help="steps between two checkpoints of `steps`")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    match options.what:
        case "ledger":
            ledger(options.lines)
        case "read":
            read(options.folder)
        case "steps":
            steps(options.steps, options.log_every, options.checkpoint_every)


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
    """Write the ledger of two attempts, the second of which does a fifth of the steps again."""
    directory = RunDirectory(LocalStore(folder))
    began_s = time.time()
    directory.record(RunStarted(time_s=began_s, launcher="ray"))
    half = num_lines // 2
    first_again = half - num_lines // 10
    for attempt, first in ((1, 1), (2, first_again)):
        # One line by what writes it in a run. By itself it would take longer than all that is measured.
        stats = StepStats(first, 2.4131834506988525, 48, 1.0, 48, 0x9E3779B97F4A7C15, finite=True)
        written = Ledger(directory.store, attempt, Plan.even(48, 8, 4), writes=True)
        written.commit([(stats, StepTimes(0.0101, began_s, 0.0002))])
        line = json.dumps(last_lines(directory.store, STEPS)[-1], separators=(",", ":"))
        pattern = line.replace(f'"step":{first}', '"step":%d').replace(f'"time_s":{round(began_s, 4)}', '"time_s":%.4f')
        with (folder / STEPS).open("a") as file:
            for start in range(first + 1, first + half, _LINES_AT_ONCE):
                steps = range(start, min(start + _LINES_AT_ONCE, first + half))
                ended_s = began_s + attempt
                file.writelines(pattern % (step, ended_s + 0.0101 * step) + "\n" for step in steps)


def read(folder: Path) -> None:
    """Read a ledger as the end of a run does, and say what that took of time and memory."""
    process = psutil.Process()
    before = process.memory_info().rss
    marks = [time.monotonic()]
    peak = before

    def mark() -> None:
        nonlocal peak
        marks.append(time.monotonic())
        peak = max(peak, process.memory_info().rss)

    totals = read_totals(RunDirectory(LocalStore(folder)), mark)
    longest_s = max(new - old for old, new in pairwise(marks))
    load = os.getloadavg()[0]
    print(f"read in {marks[-1] - marks[0]:.1f} s, {time.process_time():.1f} s of CPU time, at a load of {load:.1f}")
    print(f"longest without progress {longest_s:.2f} s; {(peak - before) / _MIB:.0f} MiB more than before at the most")
    print(json.dumps({"samples": totals.samples, "num_lost": totals.num_lost, **goodput(totals)}))


def steps(num_steps: int, log_every: int, checkpoint_every: int) -> None:
    """Train so many steps of next to nothing, with log lines and checkpoints every so many steps.

    With many of one and none of the other, what grows can be put down to one of them, or to neither.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [f"run.storage={folder}", "run.name=long", f"run.steps={num_steps}"]
        words += [f"checkpoint.every={checkpoint_every} steps", f"logging.every_steps={log_every}"]
        tiny = ["batch={global_size: 4, microbatch_size: 2}", "model.hidden=[8]"]
        command = [sys.executable, "main.py", "--config", "digits.yaml", *words, *tiny, *_TWO_WORKERS]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": folder}
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            _watch(process, Path(folder) / "long" / "steps.jsonl", num_steps)
        finally:
            process.terminate()
            print(f"exit code {process.wait(60)}", (Path(folder) / "log").read_text()[-500:])


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
                role = " (leader)" if _writes_ledger(pid) else ""
                resident[f"{name} {number}{role}"] = psutil.Process(pid).memory_info().rss / _MIB
        if time.monotonic() - began > _WARM_S and not first:
            first = resident
        done = _last_step(ledger)
        grown = {name: f"{size:.0f} ({size - first.get(name, size):+.1f})" for name, size in resident.items()}
        print(f"{time.monotonic() - began:.0f} s, step {done} of {num_steps}: MiB {grown}", flush=True)


def _writes_ledger(pid: int) -> bool:
    """Whether a process holds the ledger open, as the leader alone does."""
    return any(file.path.endswith(STEPS) for file in psutil.Process(pid).open_files())


def _last_step(ledger: Path) -> int:
    lines = last_lines(LocalStore(ledger.parent), ledger.name, 4096) if ledger.exists() else []
    return int(lines[-1]["step"]) if lines else 0


if __name__ == "__main__":
    main()
