"""Training loops as one writes them by hand: one process, torch's own optimizers and schedulers, no part of the app's.

All that they share with a run is which samples a step has, and what the augmentation of each draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR
from torch.utils.data import DataLoader, default_collate

from steadfast.data import SampleOrder
from steadfast.data.order import sample_keys
from tests.examples import mingpt, vision

SEED = 1
GLOBAL_BATCH = 64
MeanLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def resnet_by_hand(num_steps: int) -> float:
    """Do `configs/resnet.yaml` for so many steps, whose rate falls every 12; return the loss on its validation set."""
    torch.manual_seed(SEED)
    model = vision.resnet18(num_classes=10)
    optimizer = SGD(_decaying_matrices(model, 5e-4), lr=0.02, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=12, gamma=0.3)
    for images, labels in _batches(vision.Digits("train"), num_steps):
        _accumulate(model, images, labels, 32, _image_loss)
        _update(optimizer, scheduler)
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
        _update(optimizer, scheduler)
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


def _update(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    optimizer.step()
    scheduler.step()


@torch.no_grad()
def _validate(model: nn.Module, dataset: Any, mean_loss: MeanLoss) -> float:
    model.eval()
    total = 0.0
    for inputs, targets in DataLoader(dataset, batch_size=64):
        total += len(inputs) * float(mean_loss(model, inputs, targets))
    return total / len(dataset)
