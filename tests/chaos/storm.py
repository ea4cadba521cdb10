"""The verb `chaos --storm`: the same work under the same faults, by every contender, one after another."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from steadfast.config import Config, load_config
from steadfast.errors import TrainingError
from tests.chaos import contenders
from tests.chaos.command import committed_weights, final_weights, largest_difference, planned_lines
from tests.chaos.contenders import OURS, Contender
from tests.chaos.drills import Stream, inflict
from tests.chaos.loop import Job
from tests.chaos.matrix import PACE_S, SNAPSHOT_STEPS, TRAINING
from tests.chaos.report import strayed
from tests.chaos.schedules import Storm, Strike, notices, poisson
from tests.support import processes
from tests.support.bed import Bed
from tests.support.history import History
from tests.support.pace import set_pace

NUM_STEPS = 600
OUT = Path("runs/storm")
ON_NOTICE = f"{contenders.RAY_TRAIN} on notice"
SEED = 1
_NUM_WORKERS = 2
_POLL_S = 0.02
_LONGEST = 6.0  # times an undisturbed run, after which a contender is stopped
_START_S, _END_S = 120.0, 60.0
_EQUAL = 1e-10  # largest difference between fp64 weights
_COLUMNS = (
    "storm",
    "contender",
    "wall_s",
    "ettr",
    "num_faults",
    "num_attempts",
    "num_commands",
    "executed_steps",
    "wasted_steps",
    "wasted_worker_s",
    "mean_step_time_s",
    "e2e_time",
    "worker_s",
    "samples_strayed",
    "difference",
)


@dataclass
class Outcome:
    """What a storm has made of a contender. Some figures are None if the contender did not reach its last step."""

    contender: str
    storm: str
    num_steps: int
    wall_s: float  # from the first step to the last
    ettr: float | None  # effective training time ratio: steps x time of an undisturbed step / wall_s
    num_faults: int
    num_attempts: int  # worlds that have trained
    num_commands: int  # times that the command was given
    executed_steps: int
    wasted_steps: int  # steps done again
    wasted_worker_s: float
    mean_step_time_s: float  # median of a step with all workers
    e2e_time: float  # from the command to the last step
    worker_s: float  # workers x e2e_time
    samples_strayed: int | None = None  # samples lost or used twice
    difference: float | None = None  # largest difference of a weight to an undisturbed run
    strikes: list[tuple[float, str]] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)  # seconds since the command, and the step
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
        self._num_commands = 0

    def run(self, storm: Storm, num_steps: int) -> Outcome:
        """Train through the storm, to the last step or the limit of time."""
        set_pace(self._pace, PACE_S)
        began_s = time.time()
        self._command()
        strikes = storm.strikes(SEED)
        strike = next(strikes)
        undisturbed_s = num_steps * PACE_S * 4
        while self._newest < num_steps and time.time() < began_s + _START_S + _LONGEST * undisturbed_s:
            if self.contender.code() is not None:
                self._say(f"{self.contender.name}: the command ended, and is given again")
                self.contender.stop()
                self._command()
            first_s = self._first_s
            if first_s is not None and time.time() > first_s + strike.after_s:
                self._strike(strike)
                strike = next(strikes)
            time.sleep(_POLL_S)
        self._finish()
        return self._outcome(storm, num_steps, began_s)

    @property
    def _newest(self) -> int:
        return max((line["step"] for line in self.stream.read()), default=0)

    @property
    def _first_s(self) -> float | None:
        lines = self.stream.read()
        return lines[0]["time_s"] if lines else None

    def _command(self) -> None:
        self._num_commands += 1
        self.contender.start()

    def _strike(self, strike: Strike) -> None:
        self._say(f"{self.contender.name}: step {self._newest}: {strike.fault}")
        self._struck.append((time.time(), strike.fault))
        if strike.fault == "exception":
            self._pace.with_suffix(".raise").touch()
            return
        inflict(self.contender, strike.fault)
        if strike.fault == "drain":
            self.contender.add()

    def _finish(self) -> None:
        set_pace(self._pace, None)
        until_s = time.monotonic() + _END_S
        while self.contender.code() is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        self.contender.stop()

    def _outcome(self, storm: Storm, num_steps: int, began_s: float) -> Outcome:
        lines = self.stream.read()
        done = self._newest >= num_steps
        last_s = max((line["time_s"] for line in lines), default=began_s)
        first_s = self._first_s or last_s
        whole = [
            new["time_s"] - old["time_s"]
            for old, new in pairwise(lines)
            if new["attempt"] == old["attempt"] and new["world_size"] == _NUM_WORKERS
        ]
        step_s = statistics.median(whole) if whole else 0.0
        wasted = len(lines) - len(History(lines).committed)
        wall_s = last_s - first_s
        return Outcome(
            contender=self.contender.name,
            storm=storm.name,
            num_steps=num_steps,
            wall_s=wall_s,
            ettr=(num_steps - 1) * step_s / wall_s if done else None,
            num_faults=len(self._struck),
            num_attempts=len({line["attempt"] for line in lines}),
            num_commands=self._num_commands,
            executed_steps=len(lines),
            wasted_steps=wasted,
            wasted_worker_s=wasted * step_s * _NUM_WORKERS,
            mean_step_time_s=step_s,
            e2e_time=last_s - began_s,
            worker_s=(last_s - began_s) * _NUM_WORKERS,
            strikes=[(at_s - began_s, fault) for at_s, fault in self._struck],
            progress=[(line["time_s"] - began_s, line["step"]) for line in lines[:: max(1, len(lines) // 500)]],
            note="" if done else f"stopped at step {self._newest}",
        )


def storm(file: str, overrides: Sequence[str], mean_s: float) -> int:
    """Print the table of a storm, and write it as JSON. Return 0, or 1 when a claim does not hold.

    Args:
        file, overrides: the configuration, as on the command line.
        mean_s: mean time between two faults.
    """
    began_s = time.time()
    words = [*overrides, *TRAINING, f"run.steps={NUM_STEPS}"]
    config = load_config(file, words)
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}  # no other command joins these clusters
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes.adopt_orphans()

    def say(text: str) -> None:
        print(f"{time.time() - began_s:4.0f} s | {text}", flush=True)

    try:
        outcomes = _Table(["--config", file, *words], config, folder, say).run([poisson(mean_s), notices(mean_s)])
    finally:
        processes.end(list(processes.descendants()))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "storm.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    for log in folder.glob("*.log"):
        shutil.copy(log, OUT)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{table(outcomes)}\n")
    wrong = broken(outcomes)
    for sentence in wrong:
        print(f"claim broken: {sentence}")
    print(f"{'claims are broken' if wrong else 'every claim holds'}; table and logs in {OUT}")
    return 1 if wrong else 0


@dataclass
class _Table:
    words: list[str]
    config: Config
    folder: Path
    say: Callable[[str], None]

    def run(self, storms: Sequence[Storm]) -> list[Outcome]:
        outcomes = []
        for number, storm in enumerate(storms):
            for name in _contenders_of(storm):
                with Bed(_NUM_WORKERS) as bed:
                    contender = self._contender(name, f"{name.lower().replace(' ', '-')}-{number}", bed)
                    self.say(f"{name} starts; {storm.name}")
                    outcome = StormRun(contender, self._pace(contender), self.say).run(storm, NUM_STEPS)
                self.say(f"{name}: {outcome.wall_s:.0f} s from the first step to the last")
                if outcome.ettr is not None:
                    self._compare(outcome, contender)
                outcomes.append(outcome)
        return outcomes

    def _contender(self, name: str, folder: str, bed: Bed) -> Contender:
        if name == OURS:
            return contenders.ours(self.words, self.folder, bed, str(self.folder / f"pace-{folder}"), folder)
        job = self._job(folder, SNAPSHOT_STEPS)
        if name == contenders.TORCHRUN:
            return contenders.torchrun(job)
        return contenders.ray_train(job, bed, "notice" if name == ON_NOTICE else "recommended")

    def _compare(self, outcome: Outcome, contender: Contender) -> None:
        """Compare with an undisturbed run."""
        committed = History(Stream(contender.folder / "steps.jsonl").read()).committed
        if outcome.contender == OURS:
            planned = planned_lines(self.config, NUM_STEPS)
            alone = self._undisturbed(contenders.ours_undisturbed(self.words, self.folder))
            mine, theirs = (committed_weights(folder, NUM_STEPS) for folder in (contender.folder, alone))
        else:
            alone = self._undisturbed(contenders.baseline_undisturbed(self._job("baseline-undisturbed")))
            planned = History(Stream(alone / "steps.jsonl").read()).committed
            mine, theirs = final_weights(contender.folder), final_weights(alone)
        outcome.samples_strayed = strayed(committed, planned, NUM_STEPS)
        outcome.difference = largest_difference(mine, theirs)

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

    def _job(self, name: str, snapshot_steps: int = 0) -> Path:
        path = self.folder / f"{name}.job"
        job = Job(self.config, self.folder / name, snapshot_steps, str(self.folder / f"pace-{name}"))
        path.write_bytes(pickle.dumps(job))
        return path


def _contenders_of(storm: Storm) -> list[str]:
    names = [OURS, contenders.TORCHRUN, contenders.RAY_TRAIN]
    if "drain" in storm.faults:
        names.append(ON_NOTICE)
    return names


def table(outcomes: Sequence[Outcome]) -> str:
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for outcome in outcomes:
        values = asdict(outcome)
        rows.append(tuple(_shown(values[name]) for name in _COLUMNS))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    notes = [f"{outcome.contender}: {outcome.note}" for outcome in outcomes if outcome.note]
    return "\n".join([*lines, *notes])


def broken(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a sentence for each claim about this application that does not hold."""
    sentences = []
    for outcome in outcomes:
        if outcome.contender != OURS:
            continue
        if outcome.ettr is None:
            sentences.append(f"{outcome.storm}: {OURS} did not reach its last step")
            continue
        if outcome.samples_strayed:
            sentences.append(f"{outcome.storm}: {outcome.samples_strayed} samples lost or used twice")
        if outcome.difference is None or outcome.difference > _EQUAL:
            sentences.append(f"{outcome.storm}: weights differ from an undisturbed run by {outcome.difference}")
    return sentences


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)
