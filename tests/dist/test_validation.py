"""Validation: on which data, in which modes of the model, and whose metrics a checkpoint carries."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steadfast.checkpoint.catalog import Catalog
from steadfast.models import build_model
from steadfast.run.directory import RunDirectory
from tests.support.claims import EQUAL, check_identical, check_weights
from tests.support.drill import drill
from tests.support.models import Embedded
from tests.support.reference import GlobalBatch, mean_loss, reference
from tests.support.small import DRAWING, small


def test_data_of_their_own_are_validated_on_whole_whatever_the_world(tmp_path: Path) -> None:
    own = "data.validation={target: 'tests.support.small:Tokens', args: {num_samples: 11}}"
    config = small(tmp_path, own, "run.epochs=1")
    run = drill(config, worlds=[2, 3], leave_after=[2])
    assert sum(line["num_samples"] for line in run.history.lines) == 61  # none is held out
    check_weights(run, reference(config))
    model = build_model(config.model).double()
    model.load_state_dict(run.weights)
    ids = np.arange(11)
    expected = mean_loss(model.eval(), GlobalBatch(ids, ids), small(tmp_path, "data.args.num_samples=11"))
    assert run.summary["metrics"]["loss"] == pytest.approx(expected.item(), abs=EQUAL)


class Watched(Embedded):
    """Comes in evaluation mode, as from `from_pretrained`, with a part that is to stay so, and tells what it sees."""

    def __init__(self, told: str, frozen: bool) -> None:
        super().__init__()
        self._told = told
        self.dropout = nn.Dropout(0.1)
        self.train(frozen)
        if frozen:
            self.embedding.eval()

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        seen = {"step": torch.is_grad_enabled(), "dropout": self.dropout.training, "frozen": self.embedding.training}
        with open(self._told, "a") as file:
            file.write(json.dumps(seen) + "\n")
        dropped: Tensor = self.dropout(hidden)
        return dropped


@pytest.mark.parametrize("frozen", [False, True])
def test_training_steps_see_training_mode_and_validations_do_not(tmp_path: Path, frozen: bool) -> None:
    config = small(
        tmp_path,
        "model.target=tests.dist.test_validation:Watched",
        f"model.args={{told: {tmp_path}/told, frozen: {str(frozen).lower()}}}",
        "validation.every=3 steps",
    )
    drill(config, worlds=[2], stop_after=3)
    run = drill(config, worlds=[2, 1, 2], leave_after=[3, 3])
    seen = {line for line in (tmp_path / "told").read_text().splitlines() if line}
    assert [json.loads(line) for line in sorted(seen)] == [
        {"step": False, "dropout": False, "frozen": False},
        {"step": True, "dropout": False, "frozen": not frozen},  # the trial of the task, before the first step
        {"step": True, "dropout": True, "frozen": not frozen},
    ]
    notice = "these modules stay in evaluation mode: embedding"
    assert run.told("notice", "text") == ([notice] if frozen else [])


def test_a_validation_loss_that_draws_is_one_figure_at_any_number_of_workers(tmp_path: Path) -> None:
    figures = []
    for size in (1, 2, 3):
        config = small(tmp_path / f"{size}", DRAWING, "validation.every=5 steps")
        figures.append(drill(config, worlds=[size]).told("validation", "loss"))
    assert len(figures[0]) == 3
    assert figures[1] == pytest.approx(figures[0], abs=EQUAL)
    assert figures[2] == pytest.approx(figures[0], abs=EQUAL)
    assert figures[0][-1] == pytest.approx(reference(config).validation_loss, abs=EQUAL)


def test_validation_changes_no_number_that_training_draws(tmp_path: Path) -> None:
    words = DRAWING, "data.args.all_generators=true"
    often = drill(small(tmp_path / "often", *words, "validation.every=1 steps"), worlds=[2])
    once = drill(small(tmp_path / "once", *words, "validation.every=null"), worlds=[2])
    assert len(often.told("validation", "loss")) == 14
    check_identical(often, once)


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
