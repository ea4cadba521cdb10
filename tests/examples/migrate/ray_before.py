"""Digits by Ray Train: python ray_before.py"""

import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train() -> None:
    pixels, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    train_set, test_set = TensorDataset(*digits[:1536]), TensorDataset(*digits[1536:])
    torch.manual_seed(1)
    model = prepare_model(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first_epoch = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    world_size = ray.train.get_context().get_world_size()
    loader = prepare_data_loader(DataLoader(train_set, batch_size=64 // world_size))
    for epoch in range(first_epoch, 4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        inputs, targets = test_set[:]
        metrics = {"loss": cross_entropy(model(inputs), targets).item()}
        with tempfile.TemporaryDirectory() as folder:
            state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, Path(folder) / "state.pt")
            own = Checkpoint.from_directory(folder) if ray.train.get_context().get_world_rank() == 0 else None
            ray.train.report(metrics, checkpoint=own)


if __name__ == "__main__":
    run = RunConfig(name="digits", failure_config=FailureConfig(max_failures=3))
    result = TorchTrainer(train, scaling_config=ScalingConfig(num_workers=(1, 2)), run_config=run).fit()
    print(f"loss {result.metrics['loss']:.6f}")
