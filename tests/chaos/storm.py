"""One contender through one storm, and what came of it."""

import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from tests.chaos.contenders import Contender
from tests.chaos.drills import Stream, inflict
from tests.chaos.matrix import LIMIT_S, PACE_S
from tests.chaos.report import Line
from tests.chaos.schedules import NOTICE, Storm
from tests.support import processes
from tests.support.history import History
from tests.support.pace import set_pace

SEED = 1
_POLL_S = 0.02
_LONGEST = 5.0  # times an undisturbed run, after which a contender is stopped
_START_S, _END_S = 120.0, 60.0
_PARTITION_S = LIMIT_S + 3.0
_SEEN_AT_ONCE = ("kill worker", "kill node", "exception", NOTICE)


@dataclass
class Outcome:
    """What a storm has made of a contender. A figure is None if the contender did not reach its last step."""

    contender: str
    storm: str
    num_steps: int
    wall_s: float | None = None  # from the first step to the last
    ettr: float | None = None  # effective training time ratio: steps x time of an undisturbed step / wall_s
    num_faults: int | None = None
    stall_s: float | None = None  # median of the stalls by faults that are seen at once
    num_attempts: int | None = None  # worlds that have trained
    num_commands: int | None = None  # times that the command was given
    executed_steps: int | None = None
    wasted_steps: int | None = None  # steps done again
    wasted_worker_s: float | None = None
    mean_step_time_s: float | None = None  # median of a step with all workers
    step_overhead: float | None = None  # of a step without faults, over torchrun's
    e2e_time: float | None = None  # from the command to the last step
    worker_s: float | None = None  # workers, spares included, x e2e_time
    samples_strayed: int | None = None  # samples lost or used twice
    difference: float | None = None  # largest difference of a weight to an undisturbed run
    equal: bool | None = None  # whether the weights have the bits of an undisturbed run
    slowdown: float = 1.0  # of the machine
    resumed_from_steps: list[int] = field(default_factory=list)
    strikes: list[tuple[float, str]] = field(default_factory=list)  # seconds since the first step, and the fault
    progress: list[tuple[float, int]] = field(default_factory=list)  # seconds since the first step, and the step
    note: str = ""


class StormRun:
    """A contender on its way through a storm.

    Args:
        pace: file that says how long a microbatch takes.
        say: tells the user of progress.
        num_workers: workers that train when all are there.
    """

    def __init__(self, contender: Contender, pace: Path, say: Callable[[str], None], num_workers: int = 2) -> None:
        self.contender = contender
        self.stream = Stream(contender.folder / "steps.jsonl")
        self._pace = pace
        self._say = say
        self._num_workers = num_workers
        self._struck: list[tuple[float, str]] = []  # Unix time, fault
        self._cut_off: list[tuple[float, list[int]]] = []  # Unix time of the end of a partition, stopped processes
        self._num_commands = 0

    def run(self, storm: Storm) -> Outcome:
        """Train through the storm, to the last step or the limit of time."""
        set_pace(self._pace, PACE_S)
        began_s = time.time()
        self._command()
        strikes = storm.strikes(SEED)
        strike = next(strikes, None)
        until_s = began_s + _START_S + _LONGEST * storm.num_steps * PACE_S * 4
        while self._newest < storm.num_steps and time.time() < until_s:
            if self.contender.code() is not None:
                self._say(f"{self.contender.name}: the command ended, and is given again")
                self.contender.stop()
                self._command()
            self._reconnect()
            first_s = self._first_s
            if strike and first_s is not None and time.time() > first_s + strike.after_s:
                self._strike(strike.fault)
                strike = next(strikes, None)
            time.sleep(_POLL_S)
        self._finish()
        return self._outcome(storm, began_s)

    @property
    def _newest(self) -> int:
        self.stream.read()
        return self.stream.newest

    @property
    def _first_s(self) -> float | None:
        lines = self.stream.read()
        return lines[0]["time_s"] if lines else None

    @property
    def _lines(self) -> list[Line]:
        """Return a line for each time that a step was done; with torchft each group writes the line."""
        lines: dict[tuple[int, float], Line] = {}
        for line in self.stream.read():
            lines.setdefault((line["step"], line["attempt"]), line)
        return list(lines.values())

    def _command(self) -> None:
        self._num_commands += 1
        self.contender.start()

    def _strike(self, fault: str) -> None:
        self._say(f"{self.contender.name}: step {self._newest}: {fault}")
        self._struck.append((time.time(), fault))
        match fault:
            case "exception":
                self._pace.with_suffix(".raise").touch()
            case "bit flip":
                self._pace.with_suffix(".flip").touch()
            case "partition":
                # On one machine: the processes of a node are silent for some seconds, and go on.
                pids = self.contender.node_pids()
                for pid in pids:
                    processes.send(pid, signal.SIGSTOP)
                self._cut_off.append((time.time() + _PARTITION_S, pids))
            case _:
                inflict(self.contender, fault)
                if fault == NOTICE:
                    self.contender.add()

    def _reconnect(self, at_once: bool = False) -> None:
        for end_s, pids in list(self._cut_off):
            if at_once or time.time() > end_s:
                for pid in pids:
                    processes.send(pid, signal.SIGCONT)
                self._cut_off.remove((end_s, pids))

    def _finish(self) -> None:
        set_pace(self._pace, None)
        self._reconnect(at_once=True)
        until_s = time.monotonic() + _END_S
        while self.contender.code() is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        self.contender.stop()

    def _outcome(self, storm: Storm, began_s: float) -> Outcome:
        lines, newest = self._lines, self._newest
        outcome = Outcome(self.contender.name, storm.name, storm.num_steps)
        first_s = self._first_s
        if first_s is None:
            return replace(outcome, note="made no step")
        outcome.progress = [(line["time_s"] - first_s, line["step"]) for line in lines[:: max(1, len(lines) // 500)]]
        outcome.strikes = [(at_s - first_s, fault) for at_s, fault in self._struck]
        if newest < storm.num_steps:
            return replace(outcome, note=f"stopped at step {newest}")
        last_s = max(line["time_s"] for line in lines)
        whole = [
            new["time_s"] - old["time_s"]
            for old, new in pairwise(lines)
            if new["attempt"] == old["attempt"] and new["world_size"] == self._num_workers
        ]
        outcome.mean_step_time_s = step_s = statistics.median(whole) if whole else 0.0
        outcome.num_faults = len(self._struck)
        outcome.stall_s = self._stall_s(step_s)
        outcome.wall_s = last_s - first_s
        outcome.ettr = (storm.num_steps - 1) * step_s / outcome.wall_s
        outcome.num_attempts = len({line["attempt"] for line in lines})
        outcome.num_commands = self._num_commands
        outcome.executed_steps = len(lines)
        outcome.wasted_steps = len(lines) - len(History(lines).committed)
        outcome.wasted_worker_s = outcome.wasted_steps * step_s * self._num_workers
        outcome.e2e_time = last_s - began_s
        outcome.worker_s = outcome.e2e_time * self.contender.start_nodes
        resumed = [new for old, new in pairwise(lines) if new["attempt"] != old["attempt"]]
        outcome.resumed_from_steps = [lines[0]["step"] - 1, *(line["step"] - 1 for line in resumed)]
        return outcome

    def _stall_s(self, step_s: float) -> float | None:
        """Return the median of the stalls by faults that are seen at once: the longest wait for a new step."""
        times = [line["time_s"] for line in _new_steps(self._lines)]
        stalls = []
        for (at_s, fault), (end_s, _) in pairwise([*self._struck, (float("inf"), "")]):
            after = [at_s, *(time_s for time_s in times if at_s < time_s <= end_s)]
            if fault in _SEEN_AT_ONCE and len(after) > 1:
                stalls.append(max(new - old for old, new in pairwise(after)) - step_s)
        return max(0.0, statistics.median(stalls)) if stalls else None


def _new_steps(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield the lines of steps that were not done before."""
    newest = 0
    for line in lines:
        if line["step"] > newest:
            newest = line["step"]
            yield line
