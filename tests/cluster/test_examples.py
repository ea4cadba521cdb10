"""Models that were written for other trainers: a worker is killed, and they end as they do in their own loop."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader, default_collate

import tests.examples.operators  # noqa: F401 - before torchvision
from steadfast.data import SampleOrder
from steadfast.data.order import sample_keys
from tests.examples import mingpt, vision
from tests.support.checks import check_finished, check_ledger, summary_of, weights_of
from tests.support.command import Command, Commands
from tests.support.programs import run_program

from torchvision import models  # isort: skip

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def lose_a_worker(command: Command, num_steps: int, by_hand: Callable[[int], float], *overrides: str) -> None:
    """Claim: a run of which a worker is killed ends with the loss of the loop `by_hand` after as many steps."""
    running = command.start(f"run.steps={num_steps}", "scaling.num_workers=[1,2]", *overrides, small=False)
    running.wait_for_event("attempt_started", attempt=1, world_size=2, timeout_s=150)
    running.wait_for_step(num_steps // 4)
    os.kill(running.worker_pids()[0], signal.SIGKILL)
    running.wait_for_event("attempt_started", attempt=2, world_size=1, source="rank 0")
    expected = by_hand(num_steps)
    check_finished(running)
    assert check_ledger(command.directory, num_steps).num_lost == 0
    # Closer than 1 %, which a rate that falls a step too early would pass.
    assert summary_of(command.directory)["metrics"]["loss"] == pytest.approx(expected, rel=0.001)


def check_export(
    command: Command, plain: nn.Module, same: nn.Module, batch: Tensor, logits: Callable[..., Tensor]
) -> None:
    """Claim: what `export` writes is what a model that knows nothing of this program loads, and computes the same."""
    out = command.storage / "model.safetensors"
    run_program("main.py", "export", command.directory, "--out", out)
    plain.load_state_dict(load_file(out), strict=True)
    same.load_state_dict(weights_of(command.directory))
    with torch.no_grad():
        assert torch.equal(logits(plain.eval()(batch)), logits(same.eval()(batch)))


def test_a_resnet_with_its_own_validation_set_and_metrics(on_head: Commands) -> None:
    command = on_head("resnet", config="resnet.yaml")
    lose_a_worker(command, 8, resnet_by_hand, "schedule.every_steps=3")
    metrics = summary_of(command.directory)["metrics"]
    assert 0.1 < metrics["top1"] < metrics["top5"] <= 1
    images = torch.rand(3, 3, 32, 32)
    check_export(command, models.resnet18(num_classes=10), models.resnet18(num_classes=10), images, lambda out: out)


@pytest.mark.slow
def test_a_mingpt_with_its_own_loss(on_head: Commands) -> None:
    command = on_head("mingpt", config="mingpt.yaml")
    lose_a_worker(command, 80, mingpt_by_hand)
    tokens = torch.randint(100, (2, 64))
    check_export(command, mingpt.GPT(128), mingpt.GPT(128), tokens, lambda out: out[0])


# Training loops as one writes them by hand: one process, torch's own optimizers and schedulers, no part of the app's.
# All that they share with a run is which samples a step has, and what the augmentation of each draws.
SEED = 1
GLOBAL_BATCH = 64
MeanLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def resnet_by_hand(num_steps: int) -> float:
    """Do `configs/resnet.yaml` for so many steps, whose rate falls every 3; return the loss on its validation set."""
    torch.manual_seed(SEED)
    model = vision.resnet18(num_classes=10)
    optimizer = SGD(_decaying_matrices(model, 5e-4), lr=0.02, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.3)
    for images, labels in _batches(vision.Digits("train"), num_steps):
        _accumulate(model, images, labels, 32, _image_loss)
        optimizer.step()
        scheduler.step()
    return _validate(model, vision.Digits("validation", augment=False), _image_loss)


def mingpt_by_hand(num_steps: int) -> float:
    """Do `configs/mingpt.yaml` for so many steps; return the loss of a character of its validation set."""
    torch.manual_seed(SEED)
    model = mingpt.GPT(vocab_size=128)
    optimizer = AdamW(_decaying_matrices(model, 0.1, spared=("embedding", "position")), lr=3e-3, betas=(0.9, 0.95))
    scheduler = OneCycleLR(optimizer, max_lr=3e-3, total_steps=num_steps, cycle_momentum=False)
    for tokens, targets in _batches(mingpt.Characters("train"), num_steps):
        _accumulate(model, tokens, targets, 16, _character_loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return _validate(model, mingpt.Characters("validation"), _character_loss)


def _image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _character_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    loss: Tensor = model(tokens, targets)[1]
    return loss


def _decaying_matrices(model: nn.Module, weight_decay: float, spared: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, param in model.named_parameters():
        decays = param.dim() >= 2 and not name.startswith(spared)
        (decaying if decays else others).append(param)
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _batches(dataset: Any, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the samples of each step, in the order of a run of this seed that holds none of them out."""
    order = SampleOrder(len(dataset), 0.0, SEED)
    for step in range(num_steps):
        positions = np.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        ids = order.train(positions)
        samples = []
        for index, key in zip(ids.tolist(), sample_keys(ids, positions, SEED).tolist(), strict=True):
            torch.manual_seed(key)
            samples.append(dataset[index])
        inputs, targets = default_collate(samples)
        yield inputs, targets


def _accumulate(model: nn.Module, inputs: Tensor, targets: Tensor, size: int, mean_loss: MeanLoss) -> None:
    """Add up the gradient of the mean loss over microbatches of `size`."""
    model.train()
    model.zero_grad()
    for part, answers in zip(inputs.split(size), targets.split(size), strict=True):
        loss = mean_loss(model, part, answers) * (len(part) / len(inputs))
        loss.backward()


@torch.no_grad()
def _validate(model: nn.Module, dataset: Any, mean_loss: MeanLoss) -> float:
    model.eval()
    total = 0.0
    for inputs, targets in DataLoader(dataset, batch_size=64):
        total += len(inputs) * float(mean_loss(model, inputs, targets))
    return total / len(dataset)
