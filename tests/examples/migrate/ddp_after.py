"""Digits by Steadfast: torchrun --standalone --nproc-per-node 2 ddp_after.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from steadfast import Config, fit

pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
train_set, test_set = TensorDataset(*digits[:1536]), TensorDataset(*digits[1536:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
config = Config(
    run={"name": "digits", "epochs": 4},
    batch={"global_size": 64, "microbatch_size": 32},
    task={"kind": "classification"},
    optimizer={"kind": "sgd", "lr": 0.1, "momentum": 0.9, "max_grad_norm": None},
    schedule={"kind": "constant"},
)
result = fit(config, model=model, dataset=train_set, validation=test_set, order="sequential")
print(f"loss {result.summary['metrics']['loss']:.6f}")
