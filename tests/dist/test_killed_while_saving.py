"""Killed at every point of a checkpoint, or the checkpoint damaged: the same command again goes on from the newest one
that is whole, and the result is the one that an undisturbed run gives."""

import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from steadfast.checkpoint.catalog import Catalog
from steadfast.config import Config
from steadfast.run.directory import RunDirectory
from tests.support.claims import check_identical
from tests.support.drill import Drilled, drill
from tests.support.gang import MemberFailed
from tests.support.killing import (
    DAMAGES,
    Point,
    flip_a_bit,
    is_whole,
    kill_at,
    newest_whole,
    points,
    record,
    recorded,
    wait_for_each,
)
from tests.support.small import small

AT_ONCE = 2  # drills: a part of each is waiting
pytestmark = pytest.mark.timeout(900)  # each of these tests is dozens of runs


@dataclass(frozen=True)
class Scene:
    """A run of twelve steps that was stopped after the eighth, with a checkpoint of every second one.

    undisturbed: the same run, never stopped.
    """

    kind: str
    path: Path
    undisturbed: Drilled

    @property
    def num_workers(self) -> int:
        return 2 if self.kind == "fsdp" else 1

    def copy(self, to: Path, *overrides: str) -> tuple[Config, Path]:
        """The configuration of a run that has come as far, and where its checkpoints are."""
        shutil.copytree(self.path, to)
        config = _config(self.kind, to, *overrides)
        return config, Path(RunDirectory.of(config).uri) / "checkpoints"

    def check(self, resumed: Drilled, expected: int) -> int:
        """Claim: it went on from step `expected`, all steps are in its ledger as they should be, and it ended as the
        undisturbed one did. Returns where it went on."""
        restored = resumed.told("restore", "step")[-1] if resumed.told("restore", "step") else 0
        assert resumed.told("attempt_started", "step")[-1] == expected
        assert restored == expected
        assert resumed.summary["status"] == "finished"
        check_identical(resumed, self.undisturbed)
        assert _ledger(resumed) == _ledger(self.undisturbed)
        return restored


def _config(kind: str, storage: Path, *overrides: str) -> Config:
    return small(storage, "run.steps=12", f"parallel.kind={kind}", *overrides)


def _ledger(run: Drilled) -> dict[int, tuple[int, str, float]]:
    committed = run.history.committed.items()
    return {step: (line["num_samples"], line["samples_digest"], line["loss"]) for step, line in committed}


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    kind, folder = request.param, tmp_path_factory.mktemp("scene")
    num_workers = 2 if kind == "fsdp" else 1
    undisturbed = drill(_config(kind, folder / "undisturbed"), worlds=[num_workers])
    config = _config(kind, folder / "stopped", "checkpoint.every=2 steps", "checkpoint.keep_last=9")
    stopped = drill(config, worlds=[num_workers], stop_after=7, patch=wait_for_each)
    assert stopped.told("checkpoint", "step") == [2, 4, 6, 8]
    return Scene(kind, folder / "stopped", undisturbed)


# One of every operation: the newest turns out to be damaged, is given up and written again beside what is left of it,
# the oldest has to go, and so does one that was given up before.
EVENTFUL = ("checkpoint.every=4 steps", "checkpoint.keep_last=2")


def eventful(scene: Scene, to: Path) -> tuple[Config, Path]:
    config, checkpoints = scene.copy(to, *EVENTFUL)
    Catalog(RunDirectory.of(config).store).quarantine(4, "by the test")
    flip_a_bit(next((checkpoints / "step-00000008").glob("*rank-00000*")))
    return config, checkpoints


def check_committed(checkpoints: Path) -> None:
    """Claim: a kill leaves nothing that looks like a checkpoint and is none. What was damaged before it still does."""
    for path in checkpoints.glob("*/manifest.json"):
        damaged_before = path.parent.name == "step-00000008" and json.loads(path.read_bytes())["attempt"] == 1
        given_up = path.parent.with_name(f"{path.parent.name}.quarantined.json").exists()
        assert damaged_before or given_up or is_whole(path.parent)


def check_tidy(checkpoints: Path, *steps: int) -> None:
    """Claim: what is kept is whole, and of what was begun and not ended nothing stays; except that a checkpoint that
    was written anew may keep its damaged files beside it until it is deleted itself."""
    kept = sorted(checkpoints.iterdir())
    assert [path.name for path in kept] == [f"step-{step:08d}" for step in steps]
    assert all(map(is_whole, kept))
    files = json.loads((kept[-1] / "manifest.json").read_bytes())["files"]
    assert {path.name for path in kept[-1].iterdir()} == {"manifest.json", *files}


@pytest.mark.parametrize("scene", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)], indirect=True)
def test_killed_at_every_point_of_a_checkpoint(scene: Scene, tmp_path: Path) -> None:
    check_killed(scene, tmp_path, points_of_one(scene, tmp_path))


@pytest.mark.parametrize("scene", ["fsdp"], indirect=True)
def test_killed_at_the_riskiest_points_of_a_checkpoint(scene: Scene, tmp_path: Path) -> None:
    """Where a checkpoint begins or ceases to count, where a rank's file is half written, and some others."""
    riskiest: list[Point] = []
    others: list[Point] = []
    for point in points_of_one(scene, tmp_path):
        decides = point.operation.name.endswith("manifest.json")
        half_a_file = point.operation.verb == "write" and point.moment == "half-way"
        (riskiest if decides or half_a_file else others).append(point)
    check_killed(scene, tmp_path, riskiest + random.Random(7).sample(others, 3))


def points_of_one(scene: Scene, tmp_path: Path) -> list[Point]:
    """Return where one checkpoint can be interrupted, as an honest run does it."""
    config, _ = eventful(scene, tmp_path / "honest")
    log = tmp_path / "operations.jsonl"
    scene.check(drill(config, worlds=[scene.num_workers], patch=partial(record, log)), expected=6)
    operations = recorded(log)
    print(f"\n{scene.kind}: operations of one checkpoint", *operations, sep="\n  ")
    return list(points(operations))


def check_killed(scene: Scene, tmp_path: Path, at: list[Point]) -> None:
    """Claim: killed at any of these points, the run goes on from the newest checkpoint that is whole."""

    def killed(numbered: tuple[int, Point]) -> tuple[int, int]:
        number, point = numbered
        config, checkpoints = eventful(scene, tmp_path / str(number))
        with pytest.raises(MemberFailed, match=f"process {point.operation.rank}: gone"):
            drill(config, worlds=[scene.num_workers], patch=partial(kill_at, point))
        check_committed(checkpoints)
        expected = newest_whole(checkpoints)
        resumed = scene.check(drill(config, worlds=[scene.num_workers]), expected)
        check_tidy(checkpoints, 8, 12)
        return resumed, expected

    seen = set()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for point, (resumed, expected) in zip(at, threads.map(killed, enumerate(at)), strict=True):
            print(f"{scene.kind:4} | {point.moment:8} | {point.operation!s:80} | {resumed} | {expected}", flush=True)
            seen.add(expected)
    assert seen == {6, 8}, "of the points, some are before the commit and some are after it"


def test_what_is_damaged_is_given_up_for_the_one_before(scene: Scene, tmp_path: Path) -> None:
    newest = sorted(path.name for path in (scene.copy(tmp_path / "honest")[1] / "step-00000008").iterdir())
    assert len(newest) == scene.num_workers + 1, "a file of each rank, and the manifest"

    def damaged(case: tuple[Callable[[Path], None], str]) -> tuple[int, int]:
        damage, name = case
        overrides = "checkpoint.every=5 steps", "checkpoint.keep_last=9"
        config, checkpoints = scene.copy(tmp_path / f"{damage.__name__}-{name}", *overrides)
        damage(checkpoints / "step-00000008" / name)
        expected = newest_whole(checkpoints)
        given_up = [8] if (checkpoints / "step-00000008" / "manifest.json").exists() else []
        run = drill(config, worlds=[scene.num_workers])
        assert run.told("checkpoint_quarantined", "step") == given_up
        assert [int(mark.name[5:13]) for mark in checkpoints.glob("*.quarantined.json")] == given_up
        return scene.check(run, expected), expected

    cases = [(damage, name) for damage in DAMAGES for name in newest]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for (damage, name), (resumed, expected) in zip(cases, threads.map(damaged, cases), strict=True):
            print(f"{scene.kind:4} | {damage.__name__:10} | {name:42} | {resumed} | {expected}", flush=True)
            assert expected == 6


def test_where_everything_is_damaged_the_run_begins_anew(scene: Scene, tmp_path: Path) -> None:
    config, checkpoints = scene.copy(tmp_path / "copy")
    for path in checkpoints.glob("*/*.safetensors"):
        flip_a_bit(path)
    run = drill(config, worlds=[scene.num_workers])
    assert run.told("checkpoint_quarantined", "step") == [8, 6, 4, 2]
    scene.check(run, expected=0)
