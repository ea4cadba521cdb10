"""Digits by Steadfast: torchrun --standalone --nproc-per-node 2 accelerate_after.py"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from steadfast import Config, Sums, fit

pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
train_set, test_set = TensorDataset(*digits[:1536]), TensorDataset(*digits[1536:])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
    inputs, targets = batch
    return Sums(cross_entropy(model(inputs), targets, label_smoothing=0.1, reduction="sum"), len(targets))


def falling(step: int, num_steps: int) -> float:
    return 1 - (step - 1) / num_steps  # steps count from 1 here


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
config = Config(
    run={"name": "digits", "epochs": 4},
    batch={"global_size": 64, "microbatch_size": 32},
    optimizer={"lr": 0.01, "max_grad_norm": 1.0},
)
result = fit(
    config,
    model=model,
    dataset=train_set,
    validation=test_set,
    task=loss,
    optimizer=partial(torch.optim.AdamW, weight_decay=0.01),
    schedule=falling,
    order="sequential",
)
print(f"loss {result.summary['metrics']['loss']:.6f}")
