"""Tasks of a user's own whose loss would follow from the size of a microbatch are refused before the first step."""

from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from steadfast.config import Config
from steadfast.hooks.hook import HookContext
from steadfast.run.directory import RunDirectory
from steadfast.tasks import Sums
from tests.support.drill import drill
from tests.support.gang import MemberFailed
from tests.support.history import read_ledger
from tests.support.small import small

HERE = "tests.dist.test_task_check"
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


class Points:
    """Points of two classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)), index % 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.layers(points)
        return logits

    def score(self, points: Tensor) -> Tensor:
        return self.forward(points)


class Own:
    """Cross entropy: the sum over samples. Counts its calls, which no check may change."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        self.calls += 1
        points, labels = batch
        return Sums(F.cross_entropy(model(points), labels, reduction="sum"), len(points))


class Noisy(Own):
    """Adds noise that is drawn for each sample, as diffusion does."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        points, labels = batch
        return super().loss(model, (points + torch.randn_like(points), labels))


class InBatch(Own):
    """Contrasts the samples of the microbatch with each other."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        embedded = F.normalize(model(batch[0]), dim=-1)
        targets = torch.arange(len(embedded))
        return Sums(F.cross_entropy(embedded @ embedded.T, targets, reduction="sum"), len(embedded))


class Mixup(Own):
    """Mixes samples of the microbatch in pairs that are drawn at random."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        points, labels = batch
        share = float(np.random.beta(0.8, 0.8))
        other = torch.randperm(len(points))
        mixed = model(share * points + (1 - share) * points[other])
        losses = [F.cross_entropy(mixed, each, reduction="sum") for each in (labels, labels[other])]
        return Sums(share * losses[0] + (1 - share) * losses[1], len(points))


class MeanOfBatch(Own):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(F.cross_entropy(model(batch[0]), batch[1]), 1)


class MethodOfModel(Own):
    """Calls a method of the model beside forward."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(F.cross_entropy(model.score(batch[0]), batch[1], reduction="sum"), len(batch[0]))  # type: ignore[operator]


class MethodThatIsNamed(MethodOfModel):
    model_methods = ("score",)


class Detector(Net):
    """Returns losses in training mode and predictions in evaluation mode, as detectors do."""

    def forward(self, points: Tensor, labels: Tensor | None = None) -> Any:
        if not self.training:
            return super().forward(points).argmax(-1)
        assert labels is not None
        return {"loss": F.cross_entropy(super().forward(points), labels, reduction="sum")}


class OfDetector(Own):
    """Takes losses as a plain loop does, which never sees gradients in evaluation mode."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        assert model.training == torch.is_grad_enabled()
        return Sums(sum(model(*batch).values()), len(batch[0]))


class CoupledDetector(OfDetector):
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        sums = super().loss(model, batch)
        return Sums(sums.loss_sum * batch[1].sum(), sums.count)


class OwnStatistics(Net):
    """Normalizes by the microbatch in training mode, in code of its own."""

    def forward(self, points: Tensor) -> Tensor:
        return super().forward(points - points.mean(0) * self.training)


class Remembering(Net):
    """Keeps all kinds of state between its forwards, and splits weights for training, as LoRA does."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.shift = 0, [0.0], nn.Parameter(torch.zeros(6))
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def train(self, mode: bool = True) -> Self:
        self.shift.data += 0.1 if mode else -0.1
        return super().train(mode)

    def forward(self, points: Tensor) -> Tensor:
        if self.training and not self.calls:
            self.shift.data.copy_(points.mean(0))
        self.calls += 1
        self.seen.append(self.calls / 10)
        self.mean = self.mean * 0.9 + points.detach().mean(0)
        return super().forward((points - self.shift - self.mean) * (1 + self.calls / 10 + sum(self.seen)))


def own(storage: Path, task: str, *words: str) -> Config:
    sections = [f"model={{target: '{HERE}:Net'}}", f"data={{target: '{HERE}:Points'}}", "batch.microbatch_size=4"]
    return small(storage, *sections, "batch.global_size=16", "run.steps=3", f"task.target={HERE}:{task}", *words)


@KINDS
@pytest.mark.parametrize(
    ("model", "task"), [("Net", "Own"), ("Net", "Noisy"), ("Detector", "OfDetector"), ("OwnStatistics", "Own")]
)
def test_a_loss_that_is_a_sum_in_one_mode_trains(tmp_path: Path, model: str, task: str, kind: str) -> None:
    """Or in both. BatchNorm couples the samples of a microbatch in training, by design."""
    words = [f"model.target={HERE}:{model}", "data.validation_fraction=0", f"parallel.kind={kind}"]
    assert drill(own(tmp_path, task, *words), worlds=[2]).summary["status"] == "finished"


REFUSED = {
    "InBatch": r"InBatch: the loss of 4 samples is \S+, and \S+ as the sum of its halves",
    "Mixup": "Mixup: the loss of one half of a batch follows from the samples of the other half",
    "CoupledDetector": r"CoupledDetector: the loss of 4 samples is \S+, and \S+ as the sum of its halves",
    "MeanOfBatch": r"MeanOfBatch\.loss counts 1 in 4 samples, and 2 in their halves together",
}


@KINDS
@pytest.mark.parametrize("task", REFUSED)
def test_a_loss_that_couples_samples_is_refused_before_the_first_step(tmp_path: Path, task: str, kind: str) -> None:
    model = [f"model.target={HERE}:Detector"] if "Detector" in task else []
    config = own(tmp_path, task, f"parallel.kind={kind}", *model)
    with pytest.raises(MemberFailed, match=f"UsageError: {REFUSED[task]}"):
        drill(config, worlds=[2])
    assert not read_ledger(RunDirectory.of(config).store).lines


def test_a_coupled_task_keeps_its_forwards_when_memory_runs_out(tmp_path: Path) -> None:
    oom = "faults.inject=[{kind: oom_at, step: 2, rank: 0}]"
    with pytest.raises(MemberFailed, match=r"TrainingError: a forward of 4 samples does not fit .* task\.coupled=true"):
        drill(own(tmp_path, "InBatch", "task.coupled=true", oom), worlds=[1, 1])


@pytest.mark.parametrize("task", ["InBatch", "Mixup", "MeanOfBatch"])
def test_a_coupled_task_trains_on_its_microbatches_as_they_are(tmp_path: Path, task: str) -> None:
    runs = []
    for number, worlds in enumerate([[1], [3, 2]]):
        words = ["task.coupled=true", "run.steps=6"]
        run = drill(own(tmp_path / str(number), task, *words), worlds=worlds, leave_after=[2] * (len(worlds) - 1))
        runs.append([line["loss"] for line in run.history.lines])
    assert runs[0] == pytest.approx(runs[1], rel=1e-9)


@pytest.mark.parametrize("model", ["Net", "Remembering"])
def test_the_check_leaves_no_trace(tmp_path: Path, model: str) -> None:
    """Weights are those of a run without the check, and a task that counts its calls has counted its microbatches."""
    target = f"model.target={HERE}:{model}"
    checked = drill(own(tmp_path / "checked", "Own", target), worlds=[1])
    unchecked = drill(own(tmp_path / "unchecked", "Own", target), worlds=[1], patch=_check_nothing)
    assert checked.summary["model_sha256"] == unchecked.summary["model_sha256"]
    assert drill(own(tmp_path / "counted", "Counting"), worlds=[1]).summary["status"] == "finished"


def _check_nothing() -> None:
    import steadfast.train

    steadfast.train.check_task = lambda *_: None  # type: ignore[attr-defined]


class Counting(Own):
    """Fails unless it is called once for each microbatch of the run."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        sums = super().loss(model, batch)
        assert not model.training or self.calls <= 12
        return sums


def test_a_method_of_a_sharded_model_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    message = r"UsageError: MethodOfModel\.loss calls a part or a method of the model, whose weights are shards"
    with pytest.raises(MemberFailed, match=message):
        drill(own(tmp_path / "not named", "MethodOfModel", "parallel.kind=fsdp"), worlds=[2])
    named = drill(own(tmp_path / "named", "MethodThatIsNamed", "parallel.kind=fsdp"), worlds=[2])
    plain = drill(own(tmp_path / "plain", "Own"), worlds=[1])
    losses = [[line["loss"] for line in run.history.lines] for run in (named, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


class Prepared(Own):
    """Has the weights of its classes from a hook."""

    weights: Tensor

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        points, labels = batch
        return Sums(F.cross_entropy(model(points), labels, self.weights, reduction="sum"), len(points))


class Prepares:
    def on_start(self, run: HookContext) -> None:
        Prepared.weights = torch.ones(4, dtype=torch.float64)
        run.log({"prepared": 1})


@pytest.mark.parametrize("size", ["2", "auto"])
def test_a_task_may_need_what_its_hook_prepares(tmp_path: Path, size: str) -> None:
    tracker = "trackers=[{target: 'tests.examples.json_lines:JsonLines'}]"
    model = "model={target: 'torch.nn:Linear', args: {in_features: 6, out_features: 4}}"
    words = [model, tracker, f"hooks=[{{target: '{HERE}:Prepares'}}]", f"batch.microbatch_size={size}"]
    assert drill(own(tmp_path, "Prepared", *words), worlds=[1]).summary["step"] == 3
    assert "hooks/prepared" in (tmp_path / "small" / "figures.jsonl").read_text()
