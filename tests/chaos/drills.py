"""One contender through its faults, one after another."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from tests.chaos.contenders import Contender
from tests.chaos.matrix import HELD_S, NOTICE_S, NUM_STEPS, PACE_S, SLOW_S, Fault
from tests.chaos.report import Line, Row, measure, strayed
from tests.chaos.yardstick import Yardstick
from tests.support import processes
from tests.support.history import History
from tests.support.pace import set_pace

_START_S, _RECOVER_S, _END_S = 120.0, 90.0, 60.0  # longest waits, on a machine that is busy otherwise
_SETTLED = 8  # steps with a worker on every node, after which a fault is over
_STEADY = 16  # before the next one, so that it is known how long they take
_ALONE_S = 0.5  # between the deaths of the first workers and of the last
_POLL_S = 0.02


class Stream:
    """A steps.jsonl that grows. Only what is new is read, so that looking often costs the contenders nothing."""

    def __init__(self, path: Path) -> None:
        self.lines: list[Line] = []
        self.newest = 0  # step
        self._path, self._offset = path, 0

    def read(self) -> list[Line]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offset += len(whole) + 1
                new = [json.loads(line) for line in whole.splitlines()]
                self.lines += new
                self.newest = max(self.newest, *(line["step"] for line in new))
        return self.lines


@dataclass
class Drills:
    """One contender's faults, of which others have theirs in between: it trains slowly meanwhile, or hardly at all.

    say: tells the user of progress.
    pace: the file that says how slowly it trains.
    """

    contender: Contender
    say: Callable[[str], None]
    pace: Path
    yardstick: Yardstick

    def __post_init__(self) -> None:
        self.stream = Stream(self.contender.folder / "steps.jsonl")
        self._rows: list[Row] = []
        self._ends: list[int] = []  # the newest step when a fault was over

    def begin(self) -> None:
        set_pace(self.pace, HELD_S)
        self._start()

    def ready(self) -> bool:
        """Wait until it trains. Return whether it does."""
        return self._settled(self._started_s, 0.0, _START_S, 1)

    def drill(self, fault: Fault, again: Callable[[Row], bool] = lambda _: False) -> None:
        """Do a fault to it, and once more if `again` says so of what came of it; if it is one of its faults.

        One that has not got going by then is left out from now on.
        """
        if fault not in self.contender.faults or len(self._rows) < self.contender.faults.index(fault):
            return
        num_nodes = self.contender.num_nodes
        row = self._drill(fault)
        if row is not None and again(row):
            self.say(f"{row.contender}: {fault.name}: that was too long, so it is done once more")
            self.contender.restore_nodes(num_nodes)
            other = self._drill(fault)
            if other is not None and other.finished:
                redone = max(row.redone or 0, other.redone or 0)
                row = replace(other, redone=redone, former_s=row.stall_s)
        if row is not None:
            self._rows.append(row)
            self._ends.append(max(line["step"] for line in self.stream.read()))

    @property
    def last(self) -> Row | None:
        """Return what came of the last fault."""
        return self._rows[-1] if self._rows else None

    def end(self, planned: Callable[[], dict[int, Line]], equal: Callable[[], bool]) -> list[Row]:
        """Let the contender come to its end. Return a row for each of its faults.

        Args:
            planned: the steps of an undisturbed run.
            equal: whether the final weights are those of one.
        """
        set_pace(self.pace, None)
        try:
            finished = bool(self._rows) and self.finish()
        finally:
            self.contender.stop()
        rows = self._rows
        untried = [Row(fault.name, self.contender.name) for fault in self.contender.faults[len(rows) :]]
        if not finished:
            return [*rows[:-1], *(replace(row, finished=False) for row in rows[-1:]), *untried]
        committed, is_equal = History(self.stream.read()).committed, equal()
        astray = [0, *(strayed(committed, planned(), step) for step in (*self._ends[:-1], NUM_STEPS))]
        judged = []
        for row, (old, new) in zip(rows, pairwise(astray), strict=True):
            judged.append(replace(row, strayed=max(0, new - old), equal=is_equal))
        return judged + untried

    def finish(self) -> bool:
        """Wait for the end of the run. Return True if it reached its last step."""
        if not self.contender.running:
            return False
        num_lines = -1
        # However slowly, as long as it gets on.
        while self.contender.code() is None and len(self.stream.read()) > num_lines:
            num_lines = len(self.stream.read())
            self._wait(lambda: self.contender.code() is not None, _END_S if num_lines else _START_S)
        ended = self.contender.code() is not None
        done = max((line["step"] for line in self.stream.read()), default=0) == NUM_STEPS
        self.contender.stop()
        return ended and done

    def _drill(self, fault: Fault) -> Row | None:
        """Return None if the contender does not train, so that nothing can be said."""
        name = self.contender.name
        since_s = time.time()
        set_pace(self.pace, PACE_S)
        try:
            if not self._settled(since_s, 0.0, _START_S, _STEADY):
                self.say(f"{name}: {fault.name} is left out, since it does not train")
                return None
            self.say(f"{name}: {fault.name}")
            attempt = self.stream.read()[-1]["attempt"]
            fault_s = time.time()
            inflict(self.contender, fault.name)
            if not self._settled(fault_s, attempt if fault.new_attempt else 0.0, _RECOVER_S, _SETTLED):
                return self._ended(fault)
            until_s = time.time()
        finally:
            set_pace(self.pace, HELD_S)
        redone, stall_s = measure(self.stream.lines, fault_s, until_s, since_s)
        slowdown = self.yardstick.slowdown(fault_s, until_s)
        busy = f" (machine {slowdown:.1f} times as slow as alone)" if slowdown >= 1.05 else ""
        self.say(f"{name}: {fault.name}: {redone} steps redone, stall {stall_s:.2f} s{busy}")
        return Row(fault.name, name, redone, stall_s=stall_s, finished=True, slowdown=slowdown)

    def _ended(self, fault: Fault) -> Row:
        """Start a contender that a fault has ended again, by the same command: for the faults to come."""
        name = self.contender.name
        code = self.contender.code()
        self.say(f"{name}: {fault.name} ended it" + (f" with exit code {code}" if code is not None else ""))
        self.contender.stop()
        if len(self.contender.faults) > 1:
            self._start()
        return Row(fault.name, name, finished=False)

    def _start(self) -> None:
        self._started_s = time.time()
        self.contender.start()

    def _settled(self, since_s: float, after_attempt: float, patience_s: float, num_steps: int) -> bool:
        """Waits until an attempt with a worker on every node has gone some steps beyond what there was before."""

        def settled() -> bool:
            lines = self.stream.read()
            latest = lines[-num_steps:]
            newest = max((line["step"] for line in lines[:-num_steps]), default=0)
            return len(latest) == num_steps and all(
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


def inflict(contender: Contender, fault: str) -> None:
    pids = contender.worker_pids()
    match fault:
        case "kill worker":
            _signal(pids[:1], signal.SIGKILL)
        case "kill all":
            _signal(pids, signal.SIGKILL)
        case "kill last holder":
            _signal(pids[:1], signal.SIGKILL)
            time.sleep(_ALONE_S)  # whoever starts in its place has nothing yet
            _signal(pids[1:], signal.SIGKILL)
        case "kill node":
            contender.replace_node()
        case "kill coordinator":
            _signal(contender.coordinator_pids(), signal.SIGKILL)
        case "hang":
            _signal(pids[:1], signal.SIGSTOP)
        case "slow worker":
            _slow(pids[:1])
        case "grow":
            contender.add()
        case "drain":
            contender.drain(NOTICE_S)
        case "shrink":
            contender.remove()


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
