"""Losses over the embeddings of the whole global batch, at any number of workers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import default_collate

from steadfast.config import Config
from steadfast.data.order import sample_keys
from steadfast.loop.seed import seed_generators
from steadfast.optim.schedule import learning_rate
from steadfast.plan import Microbatch
from steadfast.tasks import Sums
from tests.support.claims import EQUAL, check_equal
from tests.support.deaths import Plot, survive
from tests.support.drill import drill
from tests.support.like_nccl import Death
from tests.support.reference import CPU, GlobalBatch, global_batches, held_out
from tests.support.run_directories import shrink_forwards
from tests.support.small import small

WIDTH = 5


class Pairs:
    """Two noisy views of each of 61 points, drawn anew each time that a sample is read, and a class."""

    def __len__(self) -> int:
        return 61

    def __getitem__(self, index: int) -> dict[str, Any]:
        point = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"image": point + 0.1 * torch.randn(8), "text": point - 0.1 * torch.randn(8), "label": index % 7}


class TwoTowers(nn.Module):
    """Embeds both views; dropout makes it draw, and the temperature is learned."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, WIDTH))
        self.text = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, WIDTH))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = self.scale.exp().expand(len(image))
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1), scale


class Clip:
    """Symmetric contrastive loss with the negatives of the global batch."""

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        image, text, scale = model(batch["image"], batch["text"])
        return {"views": (image, text), "scale": scale, "label": batch["label"]}

    def loss(self, embeddings: dict[str, Any]) -> Sums:
        image, text = embeddings["views"]
        logits = embeddings["scale"].mean() * image @ text.T
        targets = torch.arange(len(image))
        losses = [F.cross_entropy(each, targets, reduction="sum") for each in (logits, logits.T)]
        return Sums((losses[0] + losses[1]) / 2, len(image), {"matched": (logits.argmax(-1) == targets).sum()})


def clip(storage: Path, *words: str) -> Config:
    here = "tests.dist.test_global_loss"
    targets = [f"model={{target: '{here}:TwoTowers'}}", f"task={{target: '{here}:Clip'}}"]
    return small(storage, *targets, f"data={{target: '{here}:Pairs', validation_fraction: 0.3}}", *words)


class Expected:
    """The plain loop: one process, one forward for each microbatch, one loss of all of their embeddings."""

    def __init__(self, config: Config) -> None:
        torch.manual_seed(config.run.seed)
        self.model = TwoTowers().double()
        decayed = {"params": [p for p in self.model.parameters() if p.dim() >= 2], "weight_decay": 0.1}
        others = {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([decayed, others], betas=(0.9, 0.95))
        self.losses: list[float] = []
        batches = global_batches(config)
        for step, global_batch in enumerate(batches, 1):
            loss = self._loss(global_batch, config, step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.max_grad_norm or math.inf)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.schedule, config.optimizer.lr, step, len(batches))
            optimizer.step()
            self.losses.append(loss.item())
        self.model.eval()

    def _loss(self, global_batch: GlobalBatch, config: Config, step: int) -> Tensor:
        parts = []
        for index, batch in enumerate(_mappings(global_batch, config)):
            seed_generators(config.run.seed, Microbatch(step, index, 0, 0), CPU)
            parts.append(Clip().embed(self.model, batch))
        views = [torch.cat([part["views"][each] for part in parts]) for each in (0, 1)]
        sums = Clip().loss({"views": views, "scale": torch.cat([part["scale"] for part in parts])})
        return sums.loss_sum / sums.count

    def validation_loss(self, config: Config) -> float:
        """The mean over groups of as many samples as a global batch has, since the loss follows from their number."""
        whole, size = held_out(config), config.batch.global_size
        sums = [0.0, 0]
        for start in range(0, len(whole.ids), size):
            group = whole._replace(ids=whole.ids[start : start + size], positions=whole.positions[start : start + size])
            sums[0] += self._loss(group, config, 0).item() * len(group.ids)
            sums[1] += len(group.ids)
        return sums[0] / sums[1]


def _mappings(global_batch: GlobalBatch, config: Config) -> list[dict[str, Tensor]]:
    samples = []
    keys = sample_keys(*global_batch, config.run.seed)
    for sample, key in zip(global_batch.ids.tolist(), keys.tolist(), strict=True):
        torch.manual_seed(key)
        samples.append(Pairs()[sample])
    size = config.batch.samples_per_microbatch
    batches = [default_collate(samples[start : start + size]) for start in range(0, len(samples), size)]
    return [{name: tensor.double() for name, tensor in batch.items()} for batch in batches]


@pytest.mark.parametrize(
    "kind", ["{kind: ddp}", "{kind: ddp, reducer: torch}", "{kind: fsdp}", "{kind: fsdp, shard_size: 2}"]
)
def test_the_loss_of_the_global_batch_is_that_of_one_process_over_resizes(tmp_path: Path, kind: str) -> None:
    """13 samples by 2: the microbatches of two and of three workers are uneven."""
    config = clip(tmp_path, f"parallel={kind}")
    worlds = [2, 4, 2] if "shard_size" in kind else [1, 3, 2]
    run, expected = drill(config, worlds, leave_after=[4, 4]), Expected(config)
    assert [line["loss"] for line in run.history.lines] == pytest.approx(expected.losses, abs=EQUAL)
    check_equal(run.weights, expected.model.state_dict())
    assert run.summary["metrics"]["loss"] == pytest.approx(expected.validation_loss(config), abs=EQUAL)


@pytest.mark.parametrize("collective", [17, 20])
def test_a_death_within_a_step_changes_no_loss_over_the_global_batch(tmp_path: Path, collective: int) -> None:
    config = clip(tmp_path)
    plot = Plot(worlds=[[0, 1, 2], [0, 1, 3]], deaths={1: (2, Death(collective, "before it is launched"))})
    survived = survive(config, plot)
    assert {held.attempt for held in survived.held} >= {2}
    check_equal(survived.left.weights, Expected(config).model.state_dict())


def test_an_exact_run_has_one_hash_at_any_number_of_workers(tmp_path: Path) -> None:
    words = ["run.exact=true", "precision.kind=fp32"]
    found = set()
    for number, (worlds, leave) in enumerate([([1], []), ([2], []), ([3, 1, 2], [3, 3])]):
        run = drill(clip(tmp_path / str(number), *words), worlds=worlds, leave_after=leave)
        found.add(run.summary["model_sha256"])
    assert len(found) == 1


def test_smaller_forwards_leave_the_loss_of_the_global_batch_as_it_is(tmp_path: Path) -> None:
    """Without dropout, whose draws follow from the size of a forward."""
    model = "model={target: 'tests.dist.test_global_loss:TwoTowers', args: {dropout: 0}}"
    words = ["batch.microbatch_size=4", model]
    undisturbed = drill(clip(tmp_path / "undisturbed", *words), worlds=[2])
    config = clip(tmp_path / "small", *words)
    shrink_forwards(config, 3)
    shrunk = drill(config, worlds=[2])
    losses = [[line["loss"] for line in run.history.lines] for run in (shrunk, undisturbed)]
    assert losses[0] == pytest.approx(losses[1], abs=EQUAL)
    check_equal(shrunk.weights, undisturbed.weights)
