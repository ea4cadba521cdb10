"""Digits by Steadfast: python lightning_after.py"""

from collections.abc import Mapping

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from steadfast import Config, Sums, fit
from steadfast.hooks.hook import HookContext

pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
train_set, test_set = TensorDataset(*digits[:1536]), TensorDataset(*digits[1536:])


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
    logits = model(batch[0])
    right = (logits.argmax(1) == batch[1]).sum()
    return Sums(cross_entropy(logits, batch[1], reduction="sum"), len(logits), {"accuracy": right})


class Report:
    def on_validation(self, run: HookContext, metrics: Mapping[str, float]) -> None:
        print(run.step, metrics["accuracy"])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
config = Config(
    run={"name": "digits", "epochs": 4},
    batch={"global_size": 64, "microbatch_size": 32},
    optimizer={"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.0, "max_grad_norm": 1.0},
    schedule={"kind": "step", "every_steps": 48, "gamma": 0.5},
    validation={"every": "1 epoch"},
    checkpoint={"keep_best": {"metric": "loss"}},
    hooks=[{"kind": "early_stopping", "metric": "loss", "patience": 3}],
)
result = fit(
    config,
    model=model,
    dataset=train_set,
    validation=test_set,
    task=loss,
    hooks=[Report()],
    order="sequential",
)
