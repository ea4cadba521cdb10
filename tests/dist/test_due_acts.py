"""Deaths in validations, checkpoints and hooks lose nothing that was due: an exact run that early stopping ends.

DUE_SEEDS=0,1,2 gives other draws of ten deaths.
"""

import json
import os
import random
import signal
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import steadfast.worker
from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.durable import Checkpoints
from steadfast.checkpoint.weights import read_whole
from steadfast.config import Config
from steadfast.hooks.hook import HookContext
from steadfast.hooks.hooks import Hooks
from steadfast.loop.validate import Validator
from steadfast.run.directory import METRICS, RunDirectory
from steadfast.run.events import Validation
from steadfast.storage.jsonl import read_lines
from steadfast.telemetry.recorder import Recorder
from tests.support.deaths import Plot, take_part
from tests.support.drill import begin_run
from tests.support.gang import Gang
from tests.support.like_nccl import Death
from tests.support.small import small

SEEDS = [int(seed) for seed in os.environ.get("DUE_SEEDS", "0").split(",")]
WATCHED = "{target: 'tests.dist.test_due_acts:Watched', args: {folder: FOLDER}}"
TRACKER = "{target: 'tests.examples.json_lines:JsonLines'}"
WORDS = [
    "run.exact=true",
    "precision.kind=fp32",
    "run.steps=90",
    "optimizer.lr=0.05",
    "validation.every=3 steps",
    "checkpoint={every: 4 steps, keep_last: 2, keep_best: {metric: loss}}",
    "logging.every_steps=1",
    f"trackers=[{TRACKER}]",
]
# Where a process may die: class, method, and whether after it.
POINTS: list[tuple[Any, str, bool]] = [
    (Hooks, "on_step", False),
    (Validator, "_measure", False),
    (Validator, "_measure", True),
    (Hooks, "on_validation", False),
    (Hooks, "on_validation", True),
    (Recorder, "validation", True),
    (Hooks, "on_checkpoint", False),
    (Checkpoints, "save", True),
]


class Watched:
    """Counts what it sees in its state, and has a line in a file for each validation that a process shows it."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._steps, self._validations, self._last = 0, 0, 0

    def on_step(self, run: HookContext) -> None:
        self._steps += 1

    def on_validation(self, run: HookContext, metrics: Mapping[str, float]) -> None:
        assert run.step > self._last
        self._validations, self._last = self._validations + 1, run.step
        with open(self._folder / "seen", "a") as file:
            file.write(f"{os.getpid()} {run.step}\n")

    def on_checkpoint(self, run: HookContext) -> None:
        assert self._steps == run.step

    def state_dict(self) -> dict[str, int]:
        return {"steps": self._steps, "validations": self._validations, "last": self._last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._steps, self._validations, self._last = state["steps"], state["validations"], state["last"]


class Fall(NamedTuple):
    """Death of a rank, at a point after a step of an attempt."""

    attempt: int
    rank: int
    step: int
    point: int


class Result(NamedTuple):
    """What deaths must not change."""

    validations: dict[int, dict[str, float]]
    checkpoints: dict[int, dict[str, float]]  # metrics of those that are kept
    step: int
    reason: str
    sha256: str
    seen: int  # validations that the hook has counted


def config_of(folder: Path) -> Config:
    return small(
        folder, *WORDS, f"hooks=[{{kind: early_stopping, patience: 10}}, {WATCHED.replace('FOLDER', str(folder))}]"
    )


def deadly(falls: list[Fall]) -> None:
    """A patch: this process is killed at its falls."""
    now: list[Any] = []
    train = steadfast.worker.train  # type: ignore[attr-defined]

    def noted(runtime: Any, world: Any, worker: Any, *others: Any) -> Any:
        now[:] = world, worker
        return train(runtime, world, worker, *others)

    save = Checkpoints.save

    def save_each(self: Checkpoints, *args: Any, **kwargs: Any) -> None:
        self.wait_for_commit(60.0)  # otherwise a state that waits to be written is given up for a newer one
        save(self, *args, **kwargs)

    steadfast.worker.train = noted  # type: ignore[attr-defined, assignment]
    Checkpoints.save = save_each
    for point, (owner, method, after) in enumerate(POINTS):
        setattr(owner, method, _falling(getattr(owner, method), now, falls, point, after))


def _falling(honest: Any, now: list[Any], falls: list[Fall], point: int, after: bool) -> Any:
    def fall() -> None:
        world, worker = now
        if Fall(world.attempt, world.rank, worker.step, point) in falls:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not after:
            fall()
        answer = honest(*args, **kwargs)
        if after:
            fall()
        return answer

    return wrapped


def train(config: Config, size: int, falls: list[Fall]) -> Result:
    """Train with `size` workers, of which one falls in each attempt but the last, and a newcomer takes its place."""
    directory = begin_run(config)
    if size == 1:  # its death ends the command, which is given again
        for attempt in range(1, len(falls) + 2):
            with Gang(1, partial(deadly, falls)) as gang:
                plotted = Plot([[1]] * (attempt - 1) + [[0]], {})
                dies = attempt <= len(falls)
                assert gang.run(take_part, config, plotted, mortal=[0][:dies]) == [None if dies else True]
        return result_of(config, directory)
    worlds, deaths = [[*range(size)]], {}
    newcomers = count(size)
    for fall in falls:
        world = worlds[-1]
        victim = world[fall.rank]
        deaths[fall.attempt] = victim, Death(1 << 40, "while it runs")
        # The newcomer is the last rank, so that the place of a leader goes to a survivor, and once the first.
        others = [member for member in world if member != victim]
        newcomer = next(newcomers)
        worlds.append([newcomer, *others] if fall.attempt % 3 == 0 else [*others, newcomer])
    with Gang(size + len(falls), partial(deadly, falls)) as gang:
        victims = [victim for victim, _ in deaths.values()]
        answers = gang.run(take_part, config, Plot(worlds, deaths), mortal=victims)
        assert all((answers[member] is None) == (member in victims) for member in range(size + len(falls)))
    return result_of(config, directory)


def result_of(config: Config, directory: RunDirectory) -> Result:
    validations: dict[int, dict[str, float]] = {}
    for event in directory.events(Validation):
        # One that was measured again, because the first death had left an older state, has the same result.
        assert validations.setdefault(event.step, dict(event.metrics)) == event.metrics
    summary, catalog = directory.summary(), Catalog(directory.store)
    assert summary is not None
    kept = {step: catalog.manifest(step).metrics for step in catalog.steps()}
    seen = int(read_whole(catalog, summary["step"], "hooks.Watched")["validations"])
    return Result(validations, kept, summary["step"], summary["ended_early"], summary["model_sha256"], seen)


def check_seen_and_drawn(config: Config) -> None:
    """Claim: no process shows a hook a validation twice, and a tracker has all of metrics.jsonl."""
    folder = Path(config.run.storage)
    seen = (folder / "seen").read_text().splitlines()
    assert len(seen) == len(set(seen))
    directory = RunDirectory.of(config)
    expected = {line["step"]: line["loss"] for line in read_lines(directory.store, METRICS)}
    lines = [json.loads(line) for line in (folder / "small" / "figures.jsonl").read_text().splitlines()]
    for tag, points in (
        ("train/loss", expected),
        ("validation/loss", {event.step: event.metrics["loss"] for event in directory.events(Validation)}),
    ):
        # A kill between a figure and the note of it has the figure drawn twice, with the same value.
        assert {(line["step"], line[tag]) for line in lines if tag in line} == set(points.items())


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Result:
    config = config_of(tmp_path_factory.mktemp("calm"))
    result = train(config, 1, [])
    assert result.seen == len(result.validations) == result.step // 3 > 10
    assert result.step % 3 == 0
    assert "for 10 validations" in result.reason
    return result


def plot(seed: int, size: int, num_deaths: int, last: int) -> list[Fall]:
    """Return deaths after different steps, of which the last one is that of the end."""
    draw = random.Random(seed)
    steps = [*sorted(draw.sample(range(3, last, 3), num_deaths - 1)), last]
    falls = []
    for attempt, step in enumerate(steps, 1):
        # After the decision to end the other ranks wait for nobody.
        point = draw.randrange(4 if step == last else len(POINTS))
        falls.append(Fall(attempt, draw.randrange(size), step, point))
    return falls


@pytest.mark.parametrize("size", [1, 2])
def test_deaths_in_validations_checkpoints_and_hooks_change_nothing(tmp_path: Path, calm: Result, size: int) -> None:
    best = min(calm.validations, key=lambda step: calm.validations[step]["loss"])
    # In the checkpoint of the best validation, when another was measured, and when hooks are about to end the run.
    falls = [Fall(1, 0, best, 6), Fall(2, size - 1, best + 6, 2), Fall(3, 0, calm.step, 3)]
    config = config_of(tmp_path)
    assert train(config, size, falls) == calm
    check_seen_and_drawn(config)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_ten_deaths_at_random_points_change_nothing(tmp_path: Path, calm: Result, seed: int, size: int) -> None:
    config = config_of(tmp_path)
    assert train(config, size, plot(seed, size, 10, calm.step)) == calm
    check_seen_and_drawn(config)
