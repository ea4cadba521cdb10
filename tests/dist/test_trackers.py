"""A tracker that a user brings along by import path."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import steadfast.step.stepper
from steadfast.tasks import LanguageModeling, Sums
from steadfast.world import control
from steadfast.world.groups import PeerLost
from tests.support.claims import check_run, check_weights
from tests.support.drill import DrillRuntime, drill
from tests.support.reference import reference
from tests.support.small import small

OWN = "{target: 'tests.examples.json_lines:JsonLines', args: {file: mine.jsonl}}"
BROKEN = "{target: 'tests.dist.test_trackers:Broken'}"


class Noted:
    """Writes down in which process it is opened and closed."""

    def __init__(self, location: str, first_step: int) -> None:
        self._path = Path(location) / f"tracker-{os.getpid()}.txt"
        self._note("opened")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        self._note("closed")

    def _note(self, what: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{what}\n")


class Broken:
    """Raises in its first call, as one whose server is gone does."""

    def __init__(self, location: str, first_step: int) -> None:
        pass

    def scalars(self, step: int, values: dict[str, float]) -> None:
        raise ConnectionError("the server is gone")


def test_ones_own_tracker_has_each_log_step_once_over_a_resize_and_a_broken_one_ends_nothing(tmp_path: Path) -> None:
    words = [f"trackers=[{BROKEN}, {OWN}]", "logging.every_steps=2", "validation.every=7 steps"]
    config = small(tmp_path, *words)
    run = drill(config, worlds=[2, 3], leave_after=[5])
    check_run(run, reference(config))
    lines = [json.loads(line) for line in (tmp_path / "small" / "mine.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    assert losses == {step: run.history.committed[step]["loss"] for step in range(2, 15, 2)}
    assert [line["step"] for line in lines if "validation/loss" in line] == [7, 14]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradient_norms_are_drawn_every_so_many_steps_and_are_those_of_the_mean_gradient(
    tmp_path: Path, kind: str
) -> None:
    every = ["logging.gradient_norms_every=4 steps", "logging.every_steps=4", f"trackers=[{OWN}]"]
    config = small(tmp_path, f"parallel.kind={kind}", *every)
    drill(config, worlds=[2, 3], leave_after=[5])
    lines = [json.loads(line) for line in (tmp_path / "small" / "mine.jsonl").read_text().splitlines()]
    drawn = {line["step"]: line for line in lines if "train/gradient_norms/max" in line}
    whole = {line["step"]: line["train/grad_norm"] for line in lines if "train/grad_norm" in line}
    assert list(drawn) == [4, 8, 12]
    for step, line in drawn.items():
        assert line["train/gradient_norms/norm"] == pytest.approx(whole[step])
        assert 0 < line["train/gradient_norms/min"] < line["train/gradient_norms/max"] < whole[step]


class Parity(LanguageModeling):
    """A task whose metrics depend on the microbatch: each has a name that others lack."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums = super().loss(model, batch)
        odd = int(batch[0].sum()) % 2
        return replace(sums, metrics={"seen": torch.tensor(float(sums.count)), f"odd{odd}": torch.ones(())})


def test_metrics_of_a_task_are_logged_also_where_microbatches_have_different_ones(tmp_path: Path) -> None:
    words = [f"trackers=[{OWN}]", "logging.every_steps=1", "task.target=tests.dist.test_trackers:Parity"]
    run = drill(small(tmp_path, *words, "validation.every=null", "data.validation_fraction=0"), worlds=[3])
    assert run.summary["status"] == "finished"
    lines = [json.loads(line) for line in (tmp_path / "small" / "mine.jsonl").read_text().splitlines()]
    # Before its first step an attempt draws how often the run was interrupted.
    assert [line["train/seen"] for line in lines if "train/loss" in line] == pytest.approx([1.0] * 14)
    kept = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in kept] == list(range(1, 15))
    assert kept[-1]["metrics"]["seen"] == pytest.approx(1.0)


def lose_a_peer_while_agreeing() -> None:
    """In the first step of the first attempt, as all ranks that are left would see it."""
    agree, failed = control.agree_on_names, DrillRuntime.failed
    calls = count()

    def lost(names: Sequence[str], group: dist.ProcessGroup) -> tuple[str, ...]:
        if next(calls) == 0:
            raise PeerLost("while ranks agreed on the names of metrics")
        return agree(names, group)

    def survive(self: DrillRuntime, step: int, error: BaseException) -> bool:
        return isinstance(error, PeerLost) or failed(self, step, error)

    steadfast.step.stepper.agree_on_names = lost  # type: ignore[attr-defined]
    DrillRuntime.failed = survive


def test_a_peer_that_is_lost_while_ranks_agree_on_metrics_leaves_no_half_step(tmp_path: Path) -> None:
    config = small(tmp_path)
    run = drill(config, worlds=[2, 2], patch=lose_a_peer_while_agreeing)
    check_weights(run, reference(config))


@pytest.mark.parametrize("worlds", [[(0, 1), (1, 0)], [(0, 1), (0, 1)]], ids=["another leads", "the same one leads"])
def test_after_a_failure_no_tracker_stays_open(tmp_path: Path, worlds: list[tuple[int, ...]]) -> None:
    config = small(tmp_path, "trackers=[{target: 'tests.dist.test_trackers:Noted'}]")
    drill(config, worlds=worlds, patch=lose_a_peer_while_agreeing)
    notes = [path.read_text().split() for path in sorted((tmp_path / "small").glob("tracker-*.txt"))]
    assert len(notes) == len({world[0] for world in worlds})
    for note in notes:
        assert note.count("closed") == note.count("opened") == 2 / len(notes)
