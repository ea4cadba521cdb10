"""What a run shows of its steps: figures for a tracker of a user's own, the share of waits for data, and traces."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steadfast.tasks import LanguageModeling, Mean, Sums
from steadfast.world import control
from steadfast.world.groups import PeerLost
from tests.support.claims import check_run, check_weights
from tests.support.drill import DrillRuntime, drill
from tests.support.reference import reference
from tests.support.small import Tokens, small

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
    """A task whose metrics depend on the microbatch: each has a name that others lack, and most lack a rare one."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums = super().loss(model, batch)
        total = int(batch[0].sum())
        metrics: dict[str, Tensor | Mean] = {"seen": torch.tensor(float(sums.count)), "never": Mean(total, 0)}
        metrics[f"odd{total % 2}"] = Mean(total, 1)
        if total % 23 == 1:
            metrics["rare"] = Mean(total, 1)
        return replace(sums, metrics=metrics)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_metrics_that_few_microbatches_have_are_drawn_where_they_come_in_any_world(tmp_path: Path, kind: str) -> None:
    def figures(storage: Path, worlds: list[int], leave_after: tuple[int, ...] = ()) -> list[dict[str, float]]:
        words = [f"trackers=[{OWN}]", "logging.every_steps=1", "task.target=tests.dist.test_trackers:Parity"]
        words += ["validation.every=5 steps", "data.args={masked: false}", f"parallel.kind={kind}"]
        run = drill(small(storage, *words), worlds, leave_after)
        assert run.summary["status"] == "finished"
        drawn: list[dict[str, float]] = [{} for _ in range(15)]
        for line in map(json.loads, (storage / "small" / "mine.jsonl").read_text().splitlines()):
            for name in ("seen", "never", "odd0", "odd1", "rare"):
                for tag in (f"train/{name}", f"validation/{name}"):
                    if tag in line:
                        drawn[line["step"]][tag] = line[tag]
        kept = [json.loads(line) for line in (storage / "small" / "metrics.jsonl").read_text().splitlines()]
        for line in kept:
            assert line["metrics"] == {name: drawn[line["step"]][f"train/{name}"] for name in line["metrics"]}
            assert "never" not in line["metrics"]
        assert "never" not in run.summary["metrics"]
        return drawn

    alone = figures(tmp_path / "alone", [1])
    assert [each["train/seen"] for each in alone[1:]] == pytest.approx([1.0] * 14)
    with_rare = [step for step, each in enumerate(alone) if "train/rare" in each]
    assert with_rare[0] > 1, "a name that comes late is what this test is about"
    assert 1 < len(with_rare) < 13
    together = figures(tmp_path / "together", [2, 3], (5,))
    assert [set(each) for each in together] == [set(each) for each in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def lose_a_peer_while_agreeing() -> None:
    """In the first message of the first attempt, as all ranks that are left would see it."""
    add, failed = control.ControlChannel._add_late, DrillRuntime.failed
    calls = count()

    def lost(self: control.ControlChannel, copies: Sequence[Any]) -> Any:
        if next(calls) == 0:
            raise PeerLost("while ranks added up metrics that are new")
        return add(self, copies)

    def survive(self: DrillRuntime, step: int, error: BaseException) -> bool:
        return isinstance(error, PeerLost) or failed(self, step, error)

    control.ControlChannel._add_late = lost
    DrillRuntime.failed = survive


@pytest.mark.parametrize("worlds", [[(0, 1), (1, 0)], [(0, 1), (0, 1)]], ids=["another leads", "the same one leads"])
def test_a_peer_lost_while_ranks_agree_leaves_no_half_step(tmp_path: Path, worlds: list[tuple[int, ...]]) -> None:
    words = ["trackers=[{target: 'tests.dist.test_trackers:Noted'}]", "task.target=tests.dist.test_trackers:Parity"]
    config = small(tmp_path, *words)
    check_weights(drill(config, worlds=worlds, patch=lose_a_peer_while_agreeing), reference(config))
    notes = [path.read_text().split() for path in sorted((tmp_path / "small").glob("tracker-*.txt"))]
    assert len(notes) == len({world[0] for world in worlds})
    for note in notes:
        assert note.count("closed") == note.count("opened") == 2 / len(notes)


PAUSE_S = 0.03


class SlowTokens(Tokens):
    """Each sample takes its time, as one that comes from far away."""

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        time.sleep(PAUSE_S)
        return super().__getitem__(index)


def test_the_share_of_waits_for_data_is_what_the_dataset_takes(tmp_path: Path) -> None:
    words = ["data.target=tests.dist.test_trackers:SlowTokens", "logging.every_steps=3", "run.steps=6"]
    drill(small(tmp_path, *words), worlds=[1])
    lines = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        step_s = 13 / line["samples_per_s"]  # a step has 13 samples
        waited_s = line["data_wait"] * step_s
        assert waited_s == pytest.approx(13 * PAUSE_S, rel=0.3)
        assert waited_s >= 13 * PAUSE_S
        assert line["data_wait"] < 1


def test_a_profile_is_a_trace_for_perfetto_and_a_table_and_changes_nothing(tmp_path: Path) -> None:
    config = small(tmp_path, "profile={wait: 2, active: 2, ranks: [1]}")
    run = drill(config, worlds=[2])
    check_run(run, reference(config))
    assert run.told("profile", "rank") == [1]
    assert run.told("profile", "step") == [5]
    (path,) = run.told("profile", "path")
    (table,) = run.told("profile", "table")
    trace = json.loads(Path(path).read_text())
    steps = [each["name"] for each in trace["traceEvents"] if each.get("name", "").startswith("ProfilerStep")]
    assert len(set(steps)) == 2
    assert Path(path.replace(".pt.trace.json", ".txt")).read_text() == table
    assert "aten::" in table
    assert len(list((tmp_path / "small" / "profile").iterdir())) == 2


@pytest.mark.parametrize("profile", ["{}", "{active: 2, ranks: [7]}", "{active: 2, wait: 12}"])
def test_where_nothing_is_recorded_or_a_trace_is_incomplete_nothing_is_written(tmp_path: Path, profile: str) -> None:
    drill(small(tmp_path, f"profile={profile}"), worlds=[1])
    assert not (tmp_path / "small" / "profile").exists()
