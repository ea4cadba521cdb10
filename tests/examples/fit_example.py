"""`fit` in a program of one's own, with types that mypy and pyright accept: a classifier of points."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from steadfast import Config, Result, fit
from steadfast.config import RunConfig, TaskConfig


def train(name: str, num_steps: int) -> Result:
    """Train a small classifier, and return the trained model with the run's summary."""
    points = torch.randn(1000, 2)
    dataset = TensorDataset(points, (points[:, 0] > points[:, 1]).long())
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    config = Config(run=RunConfig(name=name, steps=num_steps), task=TaskConfig(kind="classification"))
    return fit(config, model=model, dataset=dataset)


if __name__ == "__main__":
    result = train("mine", 500)
    print(result.summary["metrics"], result.model)
