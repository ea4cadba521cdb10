"""Hooks: called on all ranks alike, with a state that outlives failures; the average of the weights; early stopping."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tests.examples.operators  # noqa: F401 - torchmetrics imports torchvision where it is installed
from steadfast.checkpoint.catalog import Catalog
from steadfast.checkpoint.weights import read_whole
from steadfast.cli import main
from steadfast.config import Config
from steadfast.hooks.hook import HookContext
from steadfast.models import build_model
from steadfast.run.directory import RunDirectory
from steadfast.run.owner import Ownership
from steadfast.tasks import LanguageModeling, Mean, Sums
from tests.support.claims import EQUAL, check_equal, check_run, check_weights
from tests.support.drill import Members, drill
from tests.support.gang import MemberFailed
from tests.support.history import read_ledger
from tests.support.patches import put_all_beyond_reach
from tests.support.reference import held_out, mean_loss, reference
from tests.support.small import small

from torchmetrics import MeanMetric  # isort: skip

EMA = "hooks=[{kind: ema, decay: 0.8}]"
MARKED = "task.target=tests.dist.test_hooks:Marked"
PIPELINE = "{kind: pipeline, stages: 2}"
DIARY = "{target: 'tests.dist.test_hooks:Diary', args: {folder: FOLDER}}"


class Diary:
    """Writes down what it is told, a file for each process, and counts steps in state of each sort."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._num_steps, self._loss, self._halved = 0, 0.0, {"steps": torch.zeros(1, dtype=torch.float64)}

    def on_start(self, run: HookContext) -> None:
        self._write(run, "start")

    def on_step(self, run: HookContext) -> None:
        self._num_steps += 1
        self._loss += 1.0 / run.step
        self._halved = {"steps": self._halved["steps"] + 0.5}  # a new tensor, as code of users makes them
        run.log({"num_steps": self._num_steps})
        self._write(run, "step")

    def on_validation(self, run: HookContext, metrics: Mapping[str, float]) -> None:
        self._write(run, "validation")

    def on_checkpoint(self, run: HookContext) -> None:
        self._write(run, "checkpoint")

    def on_end(self, run: HookContext) -> None:
        self._write(run, "end")

    def state_dict(self) -> dict[str, object]:
        return {"num_steps": self._num_steps, "loss": self._loss, "halved": self._halved}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert isinstance(state["num_steps"], int)
        assert isinstance(state["loss"], float)
        self._num_steps, self._loss = state["num_steps"], state["loss"]
        self._halved = state["halved"]  # type: ignore[assignment]

    def _write(self, run: HookContext, what: str) -> None:
        halved = self._halved["steps"].item()
        line = [what, run.attempt, run.rank, run.world_size, run.step, self._num_steps, halved, self._loss]
        with open(self._folder / "diary", "a") as file:
            file.write(json.dumps(line) + "\n")


def diary(folder: Path, *what: str) -> list[list[float]]:
    """Return what ranks have written, sorted by attempt, rank and step."""
    lines = [json.loads(line) for line in (folder / "diary").read_text().splitlines()]
    return sorted(line[1:] for line in lines if line[0] in what)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_ranks_call_hooks_after_the_same_steps_and_their_state_goes_on_in_every_world(
    tmp_path: Path, kind: str
) -> None:
    hook = DIARY.replace("FOLDER", str(tmp_path))
    own = "{target: 'tests.examples.json_lines:JsonLines'}"
    words = ["validation.every=5 steps", "checkpoint.every=4 steps", f"trackers=[{own}]", f"hooks=[{hook}]"]
    config = small(tmp_path, *words, f"parallel.kind={kind}")
    first = drill(config, worlds=[2], stop_after=5)  # agreed on one step later
    run = drill(config, worlds=[3, 2], leave_after=[3])
    check_weights(run, reference(config))  # hooks change nothing in what the run computes
    assert [line["step"] for line in first.history.lines] == list(range(1, 7))
    places = [(1, 2, range(1, 7)), (2, 3, range(7, 11)), (3, 2, range(11, 15))]
    expected = []
    for attempt, size, steps in places:
        for rank in range(size):
            for step in steps:
                harmonic = sum(1.0 / each for each in range(1, step + 1))
                expected.append([attempt, rank, size, step, step, step / 2, pytest.approx(harmonic)])
    assert diary(tmp_path, "step") == expected
    assert [line[:5] for line in diary(tmp_path, "start")] == [
        [attempt, rank, size, steps[0] - 1, steps[0] - 1] for attempt, size, steps in places for rank in range(size)
    ]
    assert [line[3] for line in diary(tmp_path, "validation") if line[1] == 0] == [5, 10, 14]
    assert [line[3] for line in diary(tmp_path, "end") if line[1] == 0] == [6, 14]
    drawn = [json.loads(line) for line in (tmp_path / "small" / "figures.jsonl").read_text().splitlines()]
    assert [line["hooks/num_steps"] for line in drawn if "hooks/num_steps" in line] == list(range(1, 15))


def test_a_step_that_is_left_out_is_no_step_for_hooks(tmp_path: Path) -> None:
    words = ["checkpoint.every=2 steps", f"hooks=[{DIARY.replace('FOLDER', str(tmp_path))}]"]
    run = drill(small(tmp_path, *words, "faults.inject=[{kind: nan_at, step: 6, rank: 1}]"), worlds=[2, 2])
    assert run.told("rollback", "steps") == [[6]]
    last = diary(tmp_path, "end")
    assert [line[3:6] for line in last] == [[14, 13, 6.5]] * 2


class Wordy:
    def state_dict(self) -> dict[str, object]:
        return {"note": "so far so good"}


def test_a_state_that_checkpoints_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    config = small(tmp_path, "hooks=[{target: 'tests.dist.test_hooks:Wordy'}]")
    with pytest.raises(MemberFailed, match="the hook Wordy wants note, a str, in checkpoints; they hold tensors"):
        drill(config, worlds=[1])


class Weights:
    """Keeps the weights after each step in a file."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_step(self, run: HookContext) -> None:
        save_file(run.model.state_dict(), self._folder / f"{run.step}.safetensors")


def averages(config: Config, step: int = 14) -> dict[str, Tensor]:
    """Return the averages that a checkpoint holds, under the model's own names."""
    state = read_whole(Catalog(RunDirectory.of(config).store), step, "hooks.Ema.averages")
    return {name: state[name] for name in sorted(state)}


def test_the_average_is_that_of_the_weights_after_each_step_and_is_what_is_validated(tmp_path: Path) -> None:
    hook = f"hooks=[{{target: 'tests.dist.test_hooks:Weights', args: {{folder: {tmp_path}}}}}]"
    drill(small(tmp_path / "steps", hook), worlds=[1])
    config = small(tmp_path, EMA)
    drill(config, worlds=[3, 1], leave_after=[4], stop_after=4)
    run = drill(config, worlds=[2])
    check_weights(run, reference(config))

    torch.manual_seed(config.run.seed)
    expected = {name: weight.detach().double() for name, weight in build_model(config.model).named_parameters()}
    for step in range(1, 15):
        weights = load_file(tmp_path / f"{step}.safetensors")
        expected = {name: 0.8 * average + 0.2 * weights[name] for name, average in expected.items()}
    check_equal(averages(config), dict(sorted(expected.items())))

    model = build_model(config.model).double().eval()
    model.load_state_dict(averages(config), strict=False)
    loss = mean_loss(model, held_out(config), config).item()
    assert run.summary["metrics"]["loss"] == pytest.approx(loss, abs=EQUAL)
    assert loss != pytest.approx(reference(config).validation_loss, abs=1e-4)

    Ownership.claim(RunDirectory.of(config).store).release()  # a folder with an owner is a run
    for words, weights in (([], averages(config)), (["--raw"], run.weights)):
        out = tmp_path / "exported.safetensors"
        assert main(0.0, ["export", str(tmp_path / "small"), "--out", str(out), *words]) == 0
        exported = load_file(out)
        assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
        assert exported.keys() == run.weights.keys()


@pytest.mark.parametrize(
    ("parallel", "worlds"),
    [
        ("{kind: fsdp}", [2, 3]),
        ("{kind: fsdp, cpu_offload: true}", [3, 2]),
        ("{kind: fsdp, shard_size: 2}", [4, [2, 3]]),
        ("{kind: fsdp, shard_size: 2, cpu_offload: true}", [[0, 1], 4]),
    ],
)
def test_averages_of_shards_are_those_of_the_whole_model(tmp_path: Path, parallel: str, worlds: list[Members]) -> None:
    words = [EMA, "validation.every=2 steps"]
    whole = drill(small(tmp_path / "ddp", *words), worlds=[1])
    config = small(tmp_path, *words, f"parallel={parallel}")
    patch = put_all_beyond_reach if "cpu_offload" in parallel else None
    run = drill(config, worlds, leave_after=[5], patch=patch)
    check_weights(run, reference(config))
    check_equal(averages(config), averages(small(tmp_path / "ddp")))
    assert run.told("validation", "loss") == pytest.approx(whole.told("validation", "loss"), abs=EQUAL)


def test_a_hook_may_be_added_to_a_run_and_taken_out_again(tmp_path: Path) -> None:
    drill(small(tmp_path), worlds=[2], stop_after=5)
    at_6 = read_whole(Catalog(RunDirectory.of(small(tmp_path)).store), 6)
    drill(small(tmp_path, EMA), worlds=[2], stop_after=1)
    found = averages(small(tmp_path), 8)
    assert all(float((found[name] - at_6[name]).abs().max()) < 0.02 for name in found)  # it begins with these weights
    run = drill(small(tmp_path), worlds=[2])
    check_run(run, reference(small(tmp_path)))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_run_that_gets_no_better_finishes_early(tmp_path: Path, num_workers: int) -> None:
    hooks = "hooks=[{kind: early_stopping, patience: 2}]"
    # A rate at which the loss on held-out samples soon gets worse.
    config = small(tmp_path, hooks, "validation.every=1 steps", "optimizer.lr=0.3", "run.steps=60")
    run = drill(config, worlds=[num_workers])
    losses = run.told("validation", "loss")
    best_step = 1 + int(np.argmin(losses))
    assert run.summary["status"] == "finished"
    # The decision falls on the second validation after the best one, and so does the end.
    assert run.summary["step"] == len(losses) == best_step + 2
    assert re.fullmatch("loss has not been better than .* for 2 validations", run.summary["ended_early"])
    assert run.told("attempt_ended", "cause") == ["finished"]


class Ender:
    """Ends the run after a step, on the last rank only."""

    def __init__(self, method: str, step: int) -> None:
        self._step = step
        setattr(self, method, self._end)

    def _end(self, run: HookContext, *_: object) -> None:
        if run.step == self._step and run.rank == run.world_size - 1:
            run.end_run(f"rank {run.rank} ends it")


@pytest.mark.parametrize("method", ["on_start", "on_step", "on_validation", "on_checkpoint"])
def test_an_end_by_one_rank_falls_on_its_step_and_holds_until_the_run_is_made_longer(
    tmp_path: Path, method: str
) -> None:
    ender = f"{{target: 'tests.dist.test_hooks:Ender', args: {{method: {method}, step: 6}}}}"
    words = [f"hooks=[{ender}]", "validation.every=3 steps", "checkpoint.every=3 steps"]
    if method == "on_start":
        drill(small(tmp_path, "validation.every=3 steps"), worlds=[1], stop_after=5)
    ended = drill(small(tmp_path, *words), worlds=[2])
    assert (ended.summary["status"], ended.summary["step"]) == ("finished", 6)
    assert ended.summary["ended_early"] == "rank 1 ends it"
    assert ended.told("validation", "step") == [3, 6]
    # As after a death before the summary was written. With the same length the decision holds.
    again = drill(small(tmp_path, *words), worlds=[1])
    # What `on_start` has decided is in no checkpoint, so the hook decides again.
    reason = "rank 0 ends it" if method == "on_start" else "rank 1 ends it"
    assert (again.summary["step"], again.summary["ended_early"]) == (6, reason)
    assert again.summary["metrics"] == ended.summary["metrics"]
    assert again.told("validation", "step") == [3, 6]
    words[0] = words[0].replace("step: 6", "step: 99")
    longer = drill(small(tmp_path, *words, "run.steps=16"), worlds=[2])
    assert (longer.summary["step"], longer.summary["ended_early"]) == (16, None)


class Marked(LanguageModeling):
    """Has a metric where a microbatch's first token is a certain one, one without a value, and one of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"spread": MeanMetric()}

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums = super().loss(model, batch)
        metrics: dict[str, Any] = {"recall": Mean(0.0, 0.0)}
        if not model.training:
            self.metrics["spread"].update(batch[0].double().std())
            if int(batch[0][0, 0]) == RARE:
                metrics["rare"] = torch.ones(())
        return replace(sums, metrics=metrics)


RARE = 11  # the first token of one of the last held-out samples alone
LONG = "data.args={num_samples: 400}"


@pytest.mark.parametrize(
    ("metric", "options", "why"),
    [
        ("los", [], '"los" is no metric of validation; nearest is loss'),
        ("sprea", [MARKED], '"sprea" is no metric of validation; nearest is spread'),
        ("raree", [MARKED, LONG], '"raree" is no metric of validation; nearest is rare'),
        ("loss", ["data.validation_fraction=0"], "no samples are held out"),
    ],
)
def test_a_name_that_validation_does_not_measure_is_refused_before_the_first_step(
    tmp_path: Path, metric: str, options: list[str], why: str
) -> None:
    keep_best = f"checkpoint.keep_best={{metric: {metric}}}"
    config = small(tmp_path, f"hooks=[{{kind: early_stopping, metric: {metric}}}]", keep_best, *options)
    with pytest.raises(MemberFailed) as failed:
        drill(config, worlds=[1 if options else 2])
    for key in ("hooks.0.metric", "checkpoint.keep_best.metric"):
        assert f"{key}: {why}" in str(failed.value)
    assert not read_ledger(RunDirectory.of(config).store).lines


@pytest.mark.parametrize("metric", ["recall", "spread", "rare"])
def test_a_watched_metric_may_come_with_few_samples_or_without_a_value(tmp_path: Path, metric: str) -> None:
    hooks = f"hooks=[{{kind: early_stopping, metric: {metric}, patience: 9}}]"
    config = small(tmp_path, MARKED, LONG, hooks, "run.steps=4", "validation.every=2 steps")
    run = drill(config, worlds=[2])
    check_weights(run, reference(config))
    assert (metric in run.summary["metrics"]) == (metric != "recall")


class Looking:
    """Looks at the gradients after each step, and does with them what a plain loop may do."""

    def on_step(self, run: HookContext) -> None:
        if any(param.grad is not None for param in run.model.parameters()):
            raise AssertionError("a hook sees a gradient")
        run.optimizer.zero_grad()
        for param in run.model.parameters():
            param.grad = torch.full_like(param, 1e3)


@pytest.mark.parametrize("parallel", ["{kind: ddp}", "{kind: ddp, reducer: torch}", "{kind: fsdp}", PIPELINE])
def test_a_hook_sees_no_gradients_after_a_step_and_cannot_change_those_of_the_next(
    tmp_path: Path, parallel: str
) -> None:
    config = small(tmp_path, f"parallel={parallel}", "hooks=[{target: 'tests.dist.test_hooks:Looking'}]")
    check_weights(drill(config, worlds=[2]), reference(config))
