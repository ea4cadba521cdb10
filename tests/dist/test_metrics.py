"""Metrics of a task that are no mean over what the loss counts."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score
from torch import Tensor, nn

import tests.examples.operators  # noqa: F401 - torchmetrics imports torchvision where it is installed
from steadfast.config import Config, parse_config
from steadfast.data import SampleOrder, build_dataset
from steadfast.models import build_model
from steadfast.tasks import Classification, Mean, Sums
from tests.support.drill import drill
from tests.support.gang import MemberFailed

from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score, MulticlassRecall  # isort: skip

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
    words = [f"run.storage={storage}", "task.target=tests.dist.test_metrics:Measured", *overrides]
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
    with pytest.raises(
        MemberFailed, match=r"metric auroc, a MulticlassAUROC, keeps a state \(preds\) that is not a sum"
    ):
        drill(_digits(tmp_path, "task.args={thresholds: null}"), worlds=[2])
