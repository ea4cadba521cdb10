"""Validation: on which data, in which modes of the model, with which metrics, and whose a checkpoint carries."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn

import tests.examples.operators  # noqa: F401 - torchmetrics imports torchvision where it is installed
from steadfast.checkpoint.catalog import Catalog
from steadfast.config import Config, parse_config
from steadfast.data import SampleOrder, build_dataset
from steadfast.models import build_model
from steadfast.run.directory import RunDirectory
from steadfast.tasks import Classification, Mean, Sums
from tests.support.claims import EQUAL, check_identical, check_weights
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.models import Embedded
from tests.support.reference import GlobalBatch, mean_loss, reference
from tests.support.small import DRAWING, small

from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score, MulticlassRecall  # isort: skip


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


DIGITS = """
run:       {steps: 8}
batch:     {global_size: 60, microbatch_size: 16}
model:     {kind: mlp, in_features: 64, out_features: 10}
data:      {target: "tests.examples.digits:dataset", validation_fraction: 0.1}
precision: {kind: fp64}
trackers:  []
logging:   {every_steps: 1}
"""


class Measured(Classification):
    """Counts the right ones among the fives alone, and keeps F1, recall and AUROC."""

    def __init__(self, thresholds: int | None = 50) -> None:
        self.metrics = {
            "f1": MulticlassF1Score(10, average="macro"),
            "recall": MulticlassRecall(10, average=None),
            "auroc": MulticlassAUROC(10, thresholds=thresholds),
        }

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        images, labels = batch
        sums = super().loss(model, batch)
        with torch.no_grad():
            logits = model(images)
        fives = labels == 5
        right = (logits.argmax(-1) == labels)[fives].sum()
        if not model.training:
            for metric in self.metrics.values():
                metric.update(logits, labels)
        return dataclasses.replace(sums, metrics={**sums.metrics, "fives": Mean(right, fives.sum())})


def _digits(storage: Path, *overrides: str) -> Config:
    words = [f"run.storage={storage}", "task.target=tests.dist.test_validation:Measured", *overrides]
    return parse_config(DIGITS, "digits.yaml", words)


@pytest.mark.parametrize(("kind", "num_workers"), [("ddp", 3), ("fsdp", 5)])
def test_metrics_with_counts_and_states_of_their_own_are_those_of_the_whole_set(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    # 180 held out in 12 microbatches: of 5 ranks, which fsdp gives equal numbers, three run a pad.
    config = _digits(tmp_path, f"parallel.kind={kind}")
    run = drill(config, worlds=[num_workers])
    found = run.summary["metrics"]

    dataset = build_dataset(config.data)
    order = SampleOrder(len(dataset), config.data.held_out_fraction, config.run.seed)
    held_out = [dataset[index] for index in order.validation(np.arange(order.num_validation))]
    images = torch.stack([image for image, _ in held_out]).double()
    labels = torch.stack([label for _, label in held_out])
    model = build_model(config.model).double().eval()
    model.load_state_dict(run.weights)
    with torch.no_grad():
        logits = model(images)
    right = logits.argmax(-1) == labels
    assert found["accuracy"] == pytest.approx(right.double().mean().item())
    assert found["fives"] == pytest.approx(right[labels == 5].double().mean().item())
    assert found["f1"] == pytest.approx(f1_score(labels, logits.argmax(-1), average="macro"), abs=1e-6)
    recalls = [right[labels == digit].double().mean().item() for digit in range(10)]
    assert [found[f"recall_{digit}"] for digit in range(10)] == pytest.approx(recalls, abs=1e-6)
    assert found["auroc"] == pytest.approx(MulticlassAUROC(10, thresholds=50)(logits, labels).item(), abs=1e-6)


def test_a_metric_that_would_keep_every_sample_is_refused(tmp_path: Path) -> None:
    said = r"metric auroc, a MulticlassAUROC, keeps a state \(preds\) that is not a sum"
    with pytest.raises(MemberFailed, match=said):
        drill(_digits(tmp_path, "task.args={thresholds: null}"), worlds=[2])
