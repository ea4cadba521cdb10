"""One contender through its faults, one after another."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from app.run.ledger import History
from tests.chaos import processes
from tests.chaos.contenders import Contender
from tests.chaos.matrix import NOTICE_S, NUM_STEPS, SLOW_S, Fault
from tests.chaos.report import Line, Row, measure, strayed

_START_S, _RECOVER_S, _END_S = 90.0, 60.0, 120.0  # longest waits, on a machine that is busy otherwise
_SETTLED = 8  # steps with a worker on every node before the next fault
_POLL_S = 0.02


class Stream:
    """A steps.jsonl that grows. Only what is new is read, so that looking often costs the contenders nothing."""

    def __init__(self, path: Path) -> None:
        self.lines: list[Line] = []
        self._path, self._offset = path, 0

    def read(self) -> list[Line]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offset += len(whole) + 1
                self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines


@dataclass
class Drills:
    """
    say: tells the user of progress.
    until_s: no fault begins after this time since the epoch.
    """

    contender: Contender
    say: Callable[[str], None]
    until_s: float

    def __post_init__(self) -> None:
        self.stream = Stream(self.contender.folder / "steps.jsonl")

    def run(self, pace: Path, planned: Callable[[], dict[int, Line]], equal: Callable[[], bool]) -> list[Row]:
        """A row for each fault.

        Args:
            pace: the file that slows forwards down while faults are under way.
            planned: the steps of an undisturbed run.
            equal: whether the final weights are those of one.
        """
        rows: list[Row] = []
        ends: list[int] = []  # the newest step when a fault was over
        untried = [Row(fault.name, self.contender.name) for fault in self.contender.faults]
        if time.time() > self.until_s:
            return untried
        pace.touch()
        try:
            self._start()
            for fault in self.contender.faults:
                if time.time() > self.until_s or not self._settled(self._started_s, 0.0, _START_S):
                    self.say(f"{self.contender.name}: {fault.name} and what follows is left out")
                    break
                rows.append(self._drill(fault))
                ends.append(max(line["step"] for line in self.stream.read()))
            pace.unlink()
            finished = bool(rows) and self.finish()
        finally:
            pace.unlink(missing_ok=True)
            self.contender.stop()
        untried = untried[len(rows) :]
        if not finished:
            return [*rows[:-1], *(replace(row, finished=False) for row in rows[-1:]), *untried]
        committed, is_equal = History(self.stream.read()).committed, equal()
        astray = [0, *(strayed(committed, planned(), step) for step in (*ends[:-1], NUM_STEPS))]
        judged = [
            replace(row, strayed=max(0, new - old), equal=is_equal)
            for row, (old, new) in zip(rows, pairwise(astray), strict=True)
        ]
        return judged + untried

    def finish(self) -> bool:
        """Waits for the end of the run; True if it reached its last step."""
        if not self.contender.running:
            return False
        ended = self._wait(lambda: self.contender.code() is not None, _END_S)
        done = max((line["step"] for line in self.stream.read()), default=0) == NUM_STEPS
        self.contender.stop()
        return ended and done

    def _drill(self, fault: Fault) -> Row:
        name = self.contender.name
        self.say(f"{name}: {fault.name}")
        attempt = self.stream.read()[-1]["attempt"]
        fault_s = time.time()
        self._inflict(fault)
        if not self._settled(fault_s, attempt if fault.new_attempt else 0.0, _RECOVER_S):
            code = self.contender.code()
            self.say(f"{name}: {fault.name} ended it" + (f" with exit code {code}" if code is not None else ""))
            self.contender.stop()
            if len(self.contender.faults) > 1:
                self._start()  # the same command again, for the faults to come and for its result
            return Row(fault.name, name, finished=False)
        redone, stall_s = measure(self.stream.lines, fault_s, time.time())
        self.say(f"{name}: {fault.name}: {redone} steps redone, stall {stall_s:.2f} s")
        return Row(fault.name, name, redone, stall_s=stall_s, finished=True)

    def _start(self) -> None:
        self._started_s = time.time()
        self.contender.start()

    def _inflict(self, fault: Fault) -> None:
        pids = self.contender.worker_pids()
        match fault.name:
            case "kill worker":
                _signal(pids[:1], signal.SIGKILL)
            case "kill all":
                _signal(pids, signal.SIGKILL)
            case "hang":
                _signal(pids[:1], signal.SIGSTOP)
            case "slow worker":
                _slow(pids[:1])
            case "grow":
                self.contender.add()
            case "drain":
                self.contender.drain(NOTICE_S)
            case "shrink":
                self.contender.remove()

    def _settled(self, since_s: float, after_attempt: float, patience_s: float) -> bool:
        """Waits until an attempt with a worker on every node has gone some steps beyond what there was before."""

        def settled() -> bool:
            lines = self.stream.read()
            latest = lines[-_SETTLED:]
            newest = max((line["step"] for line in lines[:-_SETTLED]), default=0)
            return len(latest) == _SETTLED and all(
                line["time_s"] > since_s
                and line["step"] > newest
                and line["attempt"] > after_attempt
                and line["world_size"] == self.contender.num_nodes
                for line in latest
            )

        return self._wait(settled, patience_s)

    def _wait(self, condition: Callable[[], bool], patience_s: float) -> bool:
        """False once the contender has ended or patience has run out, whatever the condition."""
        until = time.monotonic() + patience_s
        while not condition():
            if self.contender.code() is not None or time.monotonic() > until:
                return condition()
            time.sleep(_POLL_S)
        return True


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        processes.send(pid, number)


def _slow(pids: list[int]) -> None:
    until = time.monotonic() + SLOW_S
    while time.monotonic() < until:
        _signal(pids, signal.SIGSTOP)
        time.sleep(0.03)
        _signal(pids, signal.SIGCONT)
        time.sleep(0.015)
