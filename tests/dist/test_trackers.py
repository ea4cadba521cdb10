"""What a run shows of its steps: figures for a tracker of a user's own, the share of waits for data, and traces."""

import json
import os
import time
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


@pytest.mark.parametrize("worlds", [[(0, 1), (1, 0)], [(0, 1), (0, 1)]], ids=["another leads", "the same one leads"])
def test_a_peer_lost_while_ranks_agree_on_metrics_leaves_no_half_step_and_no_open_tracker(
    tmp_path: Path, worlds: list[tuple[int, ...]]
) -> None:
    config = small(tmp_path, "trackers=[{target: 'tests.dist.test_trackers:Noted'}]")
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
    profile = "profile={wait: 2, warmup: 1, active: 2, repeat: 2, ranks: [1], shapes: true}"
    config = small(tmp_path, profile)
    run = drill(config, worlds=[2])
    check_run(run, reference(config))
    assert run.told("profile", "rank") == [1, 1]
    assert run.told("profile", "step") == [5, 10]
    for path, table in zip(run.told("profile", "path"), run.told("profile", "table"), strict=True):
        trace = json.loads(Path(path).read_text())
        steps = [each["name"] for each in trace["traceEvents"] if each.get("name", "").startswith("ProfilerStep")]
        assert len(set(steps)) == 2
        assert any("Input Dims" in each.get("args", {}) for each in trace["traceEvents"])
        assert Path(path.replace(".pt.trace.json", ".txt")).read_text() == table
        assert "aten::" in table
    assert len(list((tmp_path / "small" / "profile").iterdir())) == 4


@pytest.mark.parametrize("profile", ["{}", "{active: 2, ranks: [7]}", "{active: 2, wait: 12}"])
def test_where_nothing_is_to_be_recorded_or_a_recording_is_not_complete_nothing_is_written(
    tmp_path: Path, profile: str
) -> None:
    drill(small(tmp_path, f"profile={profile}"), worlds=[1])
    assert not (tmp_path / "small" / "profile").exists()
