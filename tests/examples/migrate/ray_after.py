"""Model and data of ray_after.yaml: steadfast --config ray_after.yaml"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def digits() -> TensorDataset:
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))


def train_set() -> TensorDataset:
    return TensorDataset(*digits()[:1536])


def test_set() -> TensorDataset:
    return TensorDataset(*digits()[1536:])
