"""Models that are more than a chain of layers: buffers that a forward changes, branches that a forward leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.checkpoint.catalog import Catalog
from app.data.batches import Batch
from app.models import build_model
from app.run.directory import RunDirectory
from app.tasks import LanguageModeling, Sums
from tests.dist.checks import EQUAL, check_identical, check_run, check_weights
from tests.dist.deaths import Plot, survive, undisturbed
from tests.dist.drill import drill
from tests.dist.like_nccl import Death
from tests.dist.reference import GlobalBatch, mean_loss, reference
from tests.dist.small import VOCABULARY, Tokens, small

REDUCERS = pytest.mark.parametrize("reducer", ["steadfast", "torch"])


class Normalised(nn.Module):
    """Statistics of its inputs are buffers, which every forward in training changes."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.norm = nn.BatchNorm1d(12, momentum=momentum)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(hidden)
        return logits


class Branched(nn.Module):
    """Half of its microbatches, by what is in them, do not use one of its layers; another is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.sometimes = nn.Linear(12, 12)
        self.never = nn.Linear(12, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if int(tokens.sum()) % 2:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        logits: Tensor = self.head(hidden)
        return logits


class NamedTokens(Tokens):
    """The same tokens, as Hugging Face's datasets hold them."""

    def __getitem__(self, index: int, /) -> Any:
        inputs, targets = super().__getitem__(index)
        return {"tokens": inputs, "nested": (f"line {index}", {"targets": targets})}


class NamedLanguageModeling(LanguageModeling):
    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        assert batch["nested"][0][0].startswith("line ")
        return super().loss(model, (batch["tokens"], batch["nested"][1]["targets"]))


def test_batches_of_any_shape_go_through_a_whole_run(tmp_path: Path) -> None:
    plain = drill(small(tmp_path / "plain"), worlds=[2, 3], leave_after=[4])
    here = "tests.dist.test_unusual_models"
    words = [f"data.target={here}:NamedTokens", f"task.target={here}:NamedLanguageModeling"]
    named = drill(small(tmp_path / "named", *words), worlds=[2, 3], leave_after=[4])
    check_identical(named, plain)
    assert [line["samples_digest"] for line in named.history.lines] == [
        line["samples_digest"] for line in plain.history.lines
    ]


def test_data_of_their_own_are_validated_on_whole_whatever_the_world(tmp_path: Path) -> None:
    own = "data.validation={target: 'tests.dist.small:Tokens', args: {num_samples: 11}}"
    config = small(tmp_path, own, "run.epochs=1")
    run = drill(config, worlds=[2, 3], leave_after=[2])
    assert sum(line["num_samples"] for line in run.history.lines) == 61  # none is held out
    check_weights(run, reference(config))
    model = build_model(config.model).double()
    model.load_state_dict(run.weights)
    ids = np.arange(11)
    expected = mean_loss(model.eval(), GlobalBatch(ids, ids), small(tmp_path, "data.args.num_samples=11"))
    assert run.summary["metrics"]["loss"] == pytest.approx(expected.item(), abs=EQUAL)


class Watched(nn.Module):
    """Comes in evaluation mode, as from `from_pretrained`, with a part that is to stay so, and tells what it sees."""

    def __init__(self, told: str, frozen: bool) -> None:
        super().__init__()
        self._told = told
        self.backbone = nn.Embedding(VOCABULARY, 12)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(12, VOCABULARY)
        self.train(frozen)
        if frozen:
            self.backbone.eval()

    def forward(self, tokens: Tensor) -> Tensor:
        seen = {"step": torch.is_grad_enabled(), "dropout": self.dropout.training, "backbone": self.backbone.training}
        with open(self._told, "a") as file:
            file.write(json.dumps(seen) + "\n")
        logits: Tensor = self.head(self.dropout(self.backbone(tokens)))
        return logits


@pytest.mark.parametrize("frozen", [False, True])
def test_training_steps_see_training_mode_and_validations_do_not(tmp_path: Path, frozen: bool) -> None:
    config = small(
        tmp_path,
        "model.target=tests.dist.test_unusual_models:Watched",
        f"model.args={{told: {tmp_path}/told, frozen: {str(frozen).lower()}}}",
        "validation.every=3 steps",
    )
    run = drill(config, worlds=[2, 1, 2], leave_after=[4, 4])
    seen = {line for line in (tmp_path / "told").read_text().splitlines() if line}
    assert [json.loads(line) for line in sorted(seen)] == [
        {"step": False, "dropout": False, "backbone": False},
        {"step": True, "dropout": True, "backbone": not frozen},
    ]
    assert run.told("parts_in_evaluation", "modules") == ([["backbone"]] if frozen else [])


def test_metrics_of_a_checkpoint_are_of_its_own_step(tmp_path: Path) -> None:
    config = small(tmp_path, "validation.every=3 steps", "checkpoint.every=2 steps", "checkpoint.keep_last=20")
    run = drill(config, worlds=[2])
    validated = dict(zip(run.told("validation", "step"), run.told("validation", "loss"), strict=True))
    assert list(validated) == [3, 6, 9, 12, 14]
    catalog = Catalog(RunDirectory.of(config).store)
    found = {step: catalog.manifest(step).metrics for step in catalog.steps()}
    assert found == {step: {"loss": validated[step]} if step in validated else {} for step in range(2, 15, 2)}


def test_where_the_best_is_kept_each_validation_has_a_checkpoint(tmp_path: Path) -> None:
    config = small(tmp_path, "validation.every=3 steps", "checkpoint.keep_best={metric: loss}")
    run = drill(config, worlds=[2])
    assert run.told("checkpoint", "step") == [3, 6, 9, 12, 14]


@REDUCERS
def test_statistics_after_five_new_worlds_are_those_of_an_undisturbed_run(tmp_path: Path, reducer: str) -> None:
    words = [f"parallel.reducer={reducer}", "model.target=tests.dist.test_unusual_models:Normalised", "run.steps=18"]
    undisturbed = drill(small(tmp_path / "undisturbed", *words), worlds=[2])
    disturbed = drill(small(tmp_path / "disturbed", *words), worlds=[2] * 6, leave_after=[1] * 5)
    assert len(disturbed.pids()) == 6
    assert disturbed.history.lines[-1]["attempt"] == 6
    # Once for each microbatch, and for nothing else: no warm-up has been counted.
    assert disturbed.weights["norm.num_batches_tracked"] == 18 * 7
    check_identical(disturbed, undisturbed)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("momentum", ["0.1", "null"])
def test_running_statistics_are_those_of_one_process_at_any_world_size(
    tmp_path: Path, kind: str, momentum: str
) -> None:
    model = f"model.args={{momentum: {momentum}}}"
    words = [f"parallel.kind={kind}", "model.target=tests.dist.test_unusual_models:Normalised", model, "run.epochs=3"]
    config = small(tmp_path, *words)
    check_run(drill(config, worlds=[3, 1, 4, 2], leave_after=[2, 2, 2]), reference(config))


def test_a_run_with_running_statistics_that_is_stopped_and_resumed_is_identical(tmp_path: Path) -> None:
    words = ["precision.kind=fp32", "model.target=tests.dist.test_unusual_models:Normalised", "run.steps=40"]
    undisturbed = drill(small(tmp_path / "undisturbed", *words), worlds=[2])
    config = small(tmp_path / "stopped", *words)
    drill(config, worlds=[2], stop_after=19)
    check_identical(drill(config, worlds=[2]), undisturbed)


@pytest.mark.parametrize("collective", [14, 15])
def test_a_step_that_a_death_breaks_counts_once_in_the_statistics(tmp_path: Path, collective: int) -> None:
    words = ["model.target=tests.dist.test_unusual_models:Normalised", "run.steps=18"]
    calm = undisturbed(small(tmp_path / "undisturbed", *words))
    killed = Plot(worlds=[[0, 1, 2], [0, 1, 3]], deaths={1: (2, Death(collective, "before it is launched"))})
    survived = survive(small(tmp_path / "killed", *words), killed)
    held = [each for each in survived.held if each.attempt == 2 and each.member != 3]  # who is new holds nothing
    assert len(held) == 2
    for each in held:
        assert 0 < each.step < 18
        assert each.state.digest == calm.states[each.step].digest


def test_a_model_with_unused_branches_trains_as_one_process_does(tmp_path: Path) -> None:
    # Weight decay takes its part of a parameter whose gradient is zero, and would leave one alone that has none.
    words = ["model.target=tests.dist.test_unusual_models:Branched", "optimizer.weight_decay=0"]
    config = small(tmp_path, *words)
    check_run(drill(config, worlds=[3, 2], leave_after=[5]), reference(config))
