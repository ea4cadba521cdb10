"""The verb `chaos --storm`: the same work under the same faults, by every contender, one after another."""

import json
import os
import pickle
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from steadfast.config import Config, load_config
from steadfast.errors import TrainingError, UsageError
from tests.chaos import contenders
from tests.chaos.command import committed_weights, final_weights, largest_difference, planned_lines
from tests.chaos.contenders import OURS, Contender
from tests.chaos.drills import Stream
from tests.chaos.loop import Job
from tests.chaos.matrix import SNAPSHOT_STEPS, TRAINING
from tests.chaos.report import strayed
from tests.chaos.schedules import Storm, calm, notices, poisson, spot_trace, uniform
from tests.chaos.storm import SEED, Outcome, StormRun
from tests.chaos.storm_page import page, table
from tests.chaos.yardstick import Yardstick
from tests.support import processes
from tests.support.bed import Bed
from tests.support.history import History

ON_NOTICE = f"{contenders.RAY_TRAIN}, notice"
SPARE = f"{OURS}, 1 spare"
# Sums in integers make all worlds equal to the bit. The step of each checkpoint checks the weights of both workers.
_EXACT = ("run.exact=true", f'recompute.every="{SNAPSHOT_STEPS} steps"')
_SPARE = ("scaling={num_workers: [1, 2], gpus_per_worker: 0, spares: 1}",)
_RAY = {"RAY_kill_worker_timeout_milliseconds": "500"}  # as in `cluster/`, for all contenders
_EQUAL = 1e-10  # largest difference between fp64 weights
_STALL_S = 0.7  # most, on a quiet machine, of the median stall by faults that are seen at once


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
    plan = [(storm, name) for storm in storms(mean_s) for name in _contenders_of(storm)]
    return run_all(plan, Choice(file, overrides), Path("runs/storm"), minutes)


@dataclass(frozen=True)
class Choice:
    """What is trained.

    Attributes:
        file, overrides: the configuration, as on the command line.
        num_workers: workers of each contender, each on a node of its own.
    """

    file: str
    overrides: Sequence[str]
    num_workers: int = 2

    def words(self, steps: int) -> list[str]:
        workers = f"scaling={{num_workers: [1, {self.num_workers + 1}], gpus_per_worker: 0}}"
        return [*self.overrides, *TRAINING, workers, f"run.steps={steps}"]

    def config(self, steps: int) -> Config:
        return load_config(self.file, self.words(steps))


def run_all(plan: Sequence[tuple[Storm, str]], choice: Choice, out: Path, minutes: float) -> int:
    """Send contenders through storms, one after another. Return 0, or 1 when a claim does not hold.

    Args:
        plan: storms, each with the name of a contender.
        out: folder of the table and the logs.
        minutes: runs that would begin later are left out.
    """
    began_s = time.time()
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    # No other command joins these clusters. A stopped process holds its core for no longer than half a second.
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", **_RAY}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes.adopt_orphans()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    def say(text: str) -> None:
        print(f"{time.time() - began_s:4.0f} s | {text}", flush=True)

    runs = Runs(choice, folder, say)
    try:
        with Yardstick() as yardstick:
            for outcome in runs.run(plan, yardstick, began_s + 60 * minutes):
                runs.outcomes.append(outcome)
                _write(runs.outcomes, out)  # whatever happens later, this stays
    finally:
        processes.end(list(processes.descendants()))
        for log in folder.glob("*.log"):
            shutil.copy(log, out)
        for name in ("steps", "events"):
            for lines in folder.glob(f"*/{name}.jsonl"):
                shutil.copy(lines, out / f"{lines.parent.name}.{name}.jsonl")
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{table(runs.outcomes)}\n")
    if runs.left_out:
        print(f"left out for want of time, which --minutes gives: {len(runs.left_out)} runs, {runs.left_out[0]} first")
    wrong = broken(runs.outcomes)
    for sentence in wrong:
        print(f"claim broken: {sentence}")
    print(f"{'claims are broken' if wrong else 'every claim holds'}; table, page and logs are in {out}")
    return 1 if wrong else 0


def _write(outcomes: Sequence[Outcome], out: Path) -> None:
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
    facts = {"seed": SEED, "machine": machine, "versions": _versions()}
    document = {**facts, "outcomes": [asdict(outcome) for outcome in outcomes]}
    (out / "storm.json").write_text(json.dumps(document, indent=1))
    (out / "storm.html").write_text(page(outcomes, facts))


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
    choice: Choice
    folder: Path
    say: Callable[[str], None]
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, plan: Sequence[tuple[Storm, str]], yardstick: Yardstick, until_s: float) -> Iterator[Outcome]:
        """Yield the outcome of each run that begins in time."""
        base_s: float | None = None  # of a step of torchrun without faults
        for number, (storm, name) in enumerate(plan):
            if time.time() > until_s:
                self.left_out.append(f"{name} under {storm.name}")
                continue
            began_s = time.time()
            outcome = self._outcome(name, storm, number)
            outcome.slowdown = yardstick.slowdown(began_s, time.time())
            if storm.is_calm:
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
            outcome = StormRun(contender, self._pace(contender), self.say, self.choice.num_workers).run(storm)
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
                spare = _SPARE if name == SPARE else ()
                words = ["--config", self.choice.file, *self.choice.words(storm.num_steps), *_EXACT, *spare]
                found = contenders.ours(words, self.folder, bed, str(self.folder / f"pace-{folder}"), folder)
                found.start_nodes = self.choice.num_workers
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
            words = ["--config", self.choice.file, *self.choice.words(steps), *_EXACT]
            alone = self._undisturbed(contenders.ours_undisturbed(words, self.folder, f"undisturbed-{steps}"))
            planned = planned_lines(self.choice.config(steps), steps)
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
        outcome.equal = all(torch.equal(value, theirs[name]) for name, value in mine.items())

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

    def _job(self, name: str, steps: int, snapshot_steps: int = 0) -> Path:
        path = self.folder / f"{name}.job"
        job = Job(self.choice.config(steps), self.folder / name, snapshot_steps, str(self.folder / f"pace-{name}"))
        path.write_bytes(pickle.dumps(job))
        return path


def _folder(name: str, number: int) -> str:
    return f"{name.lower().replace(',', '').replace(' ', '-')}-{number}"


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
