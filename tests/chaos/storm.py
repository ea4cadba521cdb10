"""The verb `chaos --storm`: the same work under the same faults, by every contender, one after another."""

from __future__ import annotations

import json
import os
import pickle
import platform
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from steadfast.config import Config, load_config
from steadfast.errors import TrainingError, UsageError
from tests.chaos import contenders
from tests.chaos.command import committed_weights, final_weights, largest_difference, planned_lines
from tests.chaos.contenders import OURS, Contender
from tests.chaos.drills import Stream, inflict
from tests.chaos.loop import Job
from tests.chaos.matrix import LIMIT_S, PACE_S, SNAPSHOT_STEPS, TRAINING
from tests.chaos.report import Line, strayed
from tests.chaos.schedules import NOTICE, Storm, calm, notices, poisson, spot_trace, uniform
from tests.chaos.storm_page import page, table
from tests.chaos.yardstick import Yardstick
from tests.support import processes
from tests.support.bed import Bed
from tests.support.history import History
from tests.support.pace import set_pace

OUT = Path("runs/storm")
ON_NOTICE = f"{contenders.RAY_TRAIN}, notice"
SPARE = f"{OURS}, 1 spare"
SEED = 1
_NUM_WORKERS = 2
# Sums in integers make all worlds equal to the bit. The step of each checkpoint checks the weights of both workers.
_EXACT = ("run.exact=true", f'recompute.every="{SNAPSHOT_STEPS} steps"')
_SPARE = ("scaling={num_workers: [1, 2], gpus_per_worker: 0, spares: 1}",)
_POLL_S = 0.02
_LONGEST = 5.0  # times an undisturbed run, after which a contender is stopped
_START_S, _END_S = 120.0, 60.0
_PARTITION_S = LIMIT_S + 3.0
_EQUAL = 1e-10  # largest difference between fp64 weights
_STALL_S = 0.7  # most, on a quiet machine, of the median stall by faults that are seen at once
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
    """

    def __init__(self, contender: Contender, pace: Path, say: Callable[[str], None]) -> None:
        self.contender = contender
        self.stream = Stream(contender.folder / "steps.jsonl")
        self._pace = pace
        self._say = say
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
        return max((line["step"] for line in self.stream.read()), default=0)

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
            if new["attempt"] == old["attempt"] and new["world_size"] == _NUM_WORKERS
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
        outcome.wasted_worker_s = outcome.wasted_steps * step_s * _NUM_WORKERS
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


def storms(mean_s: float) -> list[Storm]:
    """Return all storms, the most telling ones first."""
    return [
        calm(200),
        poisson(mean_s, 600),
        notices(mean_s, 450),
        uniform(mean_s, 900),
        spot_trace(mean_s, 450),
        poisson(4 * mean_s, 900),
        poisson(40 * mean_s, 2000),
    ]


def storm(file: str, overrides: Sequence[str], mean_s: float, minutes: float) -> int:
    """Print the table of all storms, and write it as JSON and as a page. Return 0, or 1 when a claim does not hold.

    Args:
        file, overrides: the configuration, as on the command line.
        mean_s: mean time between two faults.
        minutes: runs that would begin later are left out.
    """
    began_s = time.time()
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}  # no other command joins these clusters
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes.adopt_orphans()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)

    def say(text: str) -> None:
        print(f"{time.time() - began_s:4.0f} s | {text}", flush=True)

    runs = Runs(file, overrides, folder, say)
    try:
        with Yardstick() as yardstick:
            for outcome in runs.run(storms(mean_s), yardstick, began_s + 60 * minutes):
                runs.outcomes.append(outcome)
                _write(runs.outcomes, mean_s)  # whatever happens later, this stays
    finally:
        processes.end(list(processes.descendants()))
        for log in folder.glob("*.log"):
            shutil.copy(log, OUT)
        for ledger in folder.glob("*/steps.jsonl"):
            shutil.copy(ledger, OUT / f"{ledger.parent.name}.jsonl")
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{table(runs.outcomes)}\n")
    if runs.left_out:
        print(f"left out for want of time, which --minutes gives: {len(runs.left_out)} runs, {runs.left_out[0]} first")
    wrong = broken(runs.outcomes)
    for sentence in wrong:
        print(f"claim broken: {sentence}")
    print(f"{'claims are broken' if wrong else 'every claim holds'}; table, page and logs are in {OUT}")
    return 1 if wrong else 0


def _write(outcomes: Sequence[Outcome], mean_s: float) -> None:
    facts = {"seed": SEED, "mean_s": mean_s, "machine": _machine(), "versions": _versions()}
    document = {**facts, "outcomes": [asdict(outcome) for outcome in outcomes]}
    (OUT / "storm.json").write_text(json.dumps(document, indent=1))
    (OUT / "storm.html").write_text(page(outcomes, facts))


def _machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("ray", "torchft", "steadfast"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


@dataclass
class Runs:
    """All contenders through all storms."""

    file: str
    overrides: Sequence[str]
    folder: Path
    say: Callable[[str], None]
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, storms: Sequence[Storm], yardstick: Yardstick, until_s: float) -> Iterator[Outcome]:
        """Yield the outcome of each run that begins in time."""
        base_s: float | None = None  # of a step of torchrun without faults
        for number, storm in enumerate(storms):
            for name in _contenders_of(storm):
                if time.time() > until_s:
                    self.left_out.append(f"{name} under {storm.name}")
                    continue
                began_s = time.time()
                outcome = self._outcome(name, storm, number)
                outcome.slowdown = yardstick.slowdown(began_s, time.time())
                if number == 0:
                    if name == contenders.TORCHRUN:
                        base_s = outcome.mean_step_time_s
                    if base_s and outcome.mean_step_time_s:
                        outcome.step_overhead = outcome.mean_step_time_s / base_s - 1
                yield outcome

    def _outcome(self, name: str, storm: Storm, number: int) -> Outcome:
        self.say(f"{name} starts: {storm.name}, {storm.num_steps} steps")
        with Bed(0, head_cpus=int(name == contenders.RAY_TORCHFT)) as bed:  # the head has torchft's lighthouse
            try:
                contender = self._contender(name, _folder(name, number), bed, storm)
            except UsageError as error:
                self.say(f"{name}: {error}")
                return Outcome(name, storm.name, storm.num_steps, note=str(error))
            contender.name = name
            outcome = StormRun(contender, self._pace(contender), self.say).run(storm)
        if outcome.wall_s is None:
            self.say(f"{name}: {outcome.note}")
        else:
            self.say(f"{name}: {outcome.wall_s:.0f} s from the first step to the last")
            self._compare(outcome, contender)
        return outcome

    def _contender(self, name: str, folder: str, bed: Bed, storm: Storm) -> Contender:
        job = self._job(folder, storm.num_steps, SNAPSHOT_STEPS)
        match name:
            case _ if name in (OURS, SPARE):
                words = [*self._words(storm.num_steps), *_EXACT, *(_SPARE if name == SPARE else ())]
                words = ["--config", self.file, *words]
                found = contenders.ours(words, self.folder, bed, str(self.folder / f"pace-{folder}"), folder)
                if name == SPARE:
                    # The newest node has the spare, whose loss costs nothing.
                    found.start_nodes, found.lost_node = 3, 0
                return found
            case contenders.TORCHRUN:
                return contenders.torchrun(job)
            case contenders.TORCHFT:
                return contenders.torchft(job)
            case contenders.RAY_TORCHFT:
                return contenders.ray_train(job, bed, "torchft")
            case _:
                return contenders.ray_train(job, bed, "notice" if name == ON_NOTICE else "recommended")

    def _compare(self, outcome: Outcome, contender: Contender) -> None:
        """Compare with an undisturbed run."""
        committed = History(Stream(contender.folder / "steps.jsonl").read()).committed
        steps = outcome.num_steps
        if outcome.contender in (OURS, SPARE):
            words = ["--config", self.file, *self._words(steps), *_EXACT]
            alone = self._undisturbed(contenders.ours_undisturbed(words, self.folder, f"undisturbed-{steps}"))
            planned = planned_lines(self._config(steps), steps)
            mine, theirs = (committed_weights(folder, steps) for folder in (contender.folder, alone))
        else:
            job = self._job(f"baselines-undisturbed-{steps}", steps)
            alone = self._undisturbed(contenders.baseline_undisturbed(job))
            planned = History(Stream(alone / "steps.jsonl").read()).committed
            if not (contender.folder / "final.pt").exists():
                outcome.note = "did not end within a minute of its last step"
                return
            mine, theirs = final_weights(contender.folder), final_weights(alone)
        outcome.samples_strayed = strayed(committed, planned, steps)
        outcome.difference = largest_difference(mine, theirs)
        outcome.equal = _have_same_bits(mine, theirs)

    def _undisturbed(self, contender: Contender) -> Path:
        """Run a contender that is disturbed by nothing, at the first call. Return its folder."""
        if not contender.folder.exists():
            self.say(f"{contender.name}: runs to compare with")
            contender.start()
            (process,) = contender.running
            if process.wait() != 0:
                raise TrainingError(f"the undisturbed run failed: see {contender.folder}.log")
            contender.stop()
        return contender.folder

    def _pace(self, contender: Contender) -> Path:
        return self.folder / f"pace-{contender.folder.name}"

    def _words(self, steps: int) -> list[str]:
        return [*self.overrides, *TRAINING, f"run.steps={steps}"]

    def _config(self, steps: int) -> Config:
        return load_config(self.file, self._words(steps))

    def _job(self, name: str, steps: int, snapshot_steps: int = 0) -> Path:
        path = self.folder / f"{name}.job"
        job = Job(self._config(steps), self.folder / name, snapshot_steps, str(self.folder / f"pace-{name}"))
        path.write_bytes(pickle.dumps(job))
        return path


def _folder(name: str, number: int) -> str:
    return f"{name.lower().replace(',', '').replace(' ', '-')}-{number}"


def _have_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def _contenders_of(storm: Storm) -> list[str]:
    """Return the contenders, the slowest ones last. torchrun comes first: the others' steps are measured by its own."""
    names = [contenders.TORCHRUN, OURS, SPARE, contenders.TORCHFT, contenders.RAY_TORCHFT]
    if storm.has_notice:
        names.append(ON_NOTICE)
    return [*names, contenders.RAY_TRAIN]


def broken(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a sentence for each claim about this application that does not hold."""
    sentences = []
    for outcome in outcomes:
        if outcome.contender in (OURS, SPARE):
            sentences += [f"{outcome.contender}, {outcome.storm}: {sentence}" for sentence in _broken(outcome)]
    return sentences


def _broken(outcome: Outcome) -> Iterator[str]:
    if outcome.ettr is None or outcome.wasted_steps is None:
        yield f"the last step was not reached; {outcome.note}"
        return
    if outcome.samples_strayed != 0:
        yield f"{outcome.samples_strayed} samples lost or used twice"
    if outcome.difference is None or outcome.difference > _EQUAL:
        yield f"weights differ from an undisturbed run by {outcome.difference}"
    elif not outcome.equal:
        yield "weights have other bits than those of an undisturbed run"
    # With two workers a wrong weight is found, but not whose: the command goes back to its newest checkpoint.
    num_flips = sum(fault == "bit flip" for _, fault in outcome.strikes)
    most = len(outcome.strikes) + num_flips * SNAPSHOT_STEPS
    if outcome.wasted_steps > most:
        yield f"{outcome.wasted_steps} steps done again after {len(outcome.strikes)} faults, claimed at most {most}"
    most_s = _STALL_S * outcome.slowdown
    if outcome.stall_s is not None and outcome.stall_s > most_s:
        yield f"a fault stalls for {outcome.stall_s:.2f} s, the median; claimed at most {most_s:.2f} s"
