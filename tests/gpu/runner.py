"""Run drills, each in a process of its own with a time bound, and keep what became of them."""

import json
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.child import ENDING, State
from tests.gpu.machine import ROOT, environment
from tests.gpu.scene import FIGURES
from tests.support.processes import descendants, send, title_of

PASSES: tuple[State, ...] = ("PASSED", "REHEARSED")
RESULTS, LOGS, TABLE = "drills.jsonl", "logs.tar.gz", "table.md"
_LARGEST_LOG_BYTES = 2**20
_FIGURES_CHARACTERS = 700  # of a drill, where all that is printed comes back from a machine as its last part only
_POLL_S = 0.1
_REHEARSAL_FACTOR = 2  # to bounds: a rehearsal has few cores, and some that others use


@dataclass(frozen=True)
class Drill:
    """A drill and its place in the order.

    Attributes:
        target: "module:function", called with a Scene.
        expected_s: seconds that it is expected to take on an H200.
        bound_s: it has FAILED if it lasts longer.
        first: it is among those that one command runs within eight minutes.
        alone: it measures time, so no other runs beside it.
        needs: another drill without whose success this one says nothing.
        torch_alone: it does without the app, and so without the packages that the app needs.
    """

    name: str
    summary: str
    target: str
    expected_s: float = 0.0
    bound_s: float = 60.0
    first: bool = False
    alone: bool = False
    needs: str = ""
    torch_alone: bool = False


@dataclass(frozen=True)
class Result:
    """What became of a drill."""

    name: str
    state: State
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Runner:
    """Runs drills one after another, or beside each other where none of them measures time.

    Args:
        out: for results and table, which are there as soon as a drill has ended, and at the end for the logs.
        work: for the drills' folders.
        table: makes the table of the results so far.
    """

    def __init__(
        self,
        out: Path,
        work: Path,
        device: str,
        minutes: float,
        jobs: int,
        table: Callable[[Sequence[Result]], str] | None = None,
    ) -> None:
        self._out, self._work, self._device, self._jobs = out, work, device, jobs
        self._table = table
        self._ends_s = time.monotonic() + 60 * minutes
        self._lock = threading.Lock()
        self.results: dict[str, Result] = {}

    def run(self, drills: Sequence[Drill]) -> list[Result]:
        """Run all drills, those that must be alone first, and return the results in the order of `drills`."""
        for drill in drills:
            if drill.alone:
                self._take(drill)
        with ThreadPoolExecutor(self._jobs) as pool:
            list(pool.map(self._take, [drill for drill in drills if not drill.alone]))
        with tarfile.open(self._out / LOGS, "w:gz") as logs:
            for drill in drills:
                self._keep_logs(self._work / drill.name, logs)
        return [self.results[drill.name] for drill in drills]

    def stop(self) -> None:
        """Cut off the drills that run, and begin no other. Safe in a signal's handler."""
        self._ends_s = 0.0

    def _take(self, drill: Drill) -> None:
        reason = self._reason_to_skip(drill)
        result = Result(drill.name, "SKIPPED", reason=reason) if reason else self._execute(drill)
        with self._lock:
            self.results[drill.name] = result
            with (self._out / RESULTS).open("a") as lines:
                lines.write(json.dumps({"time_s": round(time.time(), 1), **vars(result)}) + "\n")
            if self._table is not None:
                (self._out / TABLE).write_text(self._table(list(self.results.values())))
            _delete_checkpoints(self._work / drill.name)
            print(f"{result.state:<9} {drill.name} ({result.seconds:.0f} s) {result.reason:.300}")
            if result.figures:
                print("  " + json.dumps(result.figures)[:_FIGURES_CHARACTERS], flush=True)

    def _reason_to_skip(self, drill: Drill) -> str:
        needed = self.results.get(drill.needs)
        if needed is not None and needed.state not in PASSES:
            return f"{drill.needs} is {needed.state}, without which this says nothing"
        if time.monotonic() >= self._ends_s:
            return "no time was left"
        return ""

    def _execute(self, drill: Drill) -> Result:
        folder = self._work / drill.name
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, whose figures must not be taken for these
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "tests.gpu.child", drill.target]
        command += ["--device", self._device, "--folder", str(folder)]
        command += [] if drill.torch_alone else ["--app"]
        began_s = time.monotonic()
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        bound_s = drill.bound_s * (1 if self._device == "cuda" else _REHEARSAL_FACTOR)
        in_time = _wait(process, lambda: time.monotonic() < min(began_s + bound_s, self._ends_s))
        seconds = time.monotonic() - began_s
        figures = _read(folder / FIGURES)
        ending: dict[str, Any] = _read(folder / ENDING)
        if not in_time:
            ending = _cut_off(bound_s, seconds, figures)
        elif not ending:
            reason = f"the process ended with {process.returncode}: see {drill.name}/log.txt"
            ending = {"state": "FAILED", "reason": reason}
        state: State = ending["state"]
        return Result(drill.name, state, round(seconds, 1), ending["reason"], figures.get("figures", {}))

    def _keep_logs(self, folder: Path, logs: tarfile.TarFile) -> None:
        """Add the small files of a drill that has ended to the logs."""
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.stat().st_size <= _LARGEST_LOG_BYTES:
                logs.add(path, str(path.relative_to(self._work)))


def _delete_checkpoints(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        path.unlink()


def expected_s(drills: Sequence[Drill], jobs: int) -> float:
    """Return the seconds that drills are expected to take on an H200, `jobs` at a time where they may."""
    beside = [drill.expected_s for drill in drills if not drill.alone]
    alone_s = sum(drill.expected_s for drill in drills if drill.alone)
    return alone_s + max(sum(beside) / jobs, max(beside, default=0.0))


def _wait(process: subprocess.Popen[bytes], goes_on: Callable[[], bool]) -> bool:
    """Wait for a drill to end, and end what it has started. Return False if it had to be ended itself."""
    started: dict[int, str] = {}
    while process.poll() is None and goes_on():
        started |= descendants(process.pid)
        time.sleep(_POLL_S)
    in_time = process.poll() is not None
    started |= descendants(process.pid)
    process.kill()
    process.wait()
    # Torchrun's workers lead sessions of their own, so the drill's process group is not all of it.
    for pid, title in started.items():
        if title and title_of(pid) == title:  # else the number is another process's by now
            send(pid, signal.SIGKILL)
    return in_time


def _cut_off(bound_s: float, seconds: float, figures: dict[str, Any]) -> dict[str, Any]:
    failures = figures.get("failures", [])
    if failures or seconds >= bound_s:
        said = "; ".join([f"it did not end within {bound_s:g} s", *failures])
        return {"state": "FAILED", "reason": said}
    return {"state": "SKIPPED", "reason": f"it was cut off after {seconds:.0f} s, when the time for all was over"}


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):  # it was killed while it wrote
        return {}
    return found
