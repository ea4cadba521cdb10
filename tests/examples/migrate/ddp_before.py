"""Digits by DDP: torchrun --standalone --nproc-per-node 2 ddp_before.py"""

from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
train_set, test_set = TensorDataset(*digits[:1536]), TensorDataset(*digits[1536:])

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
checkpoint, first_epoch = Path("checkpoint.pt"), 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first_epoch = state["epoch"] + 1

sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=64 // dist.get_world_size(), sampler=sampler)
for epoch in range(first_epoch, 4):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        state = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, checkpoint)

if dist.get_rank() == 0:
    inputs, targets = test_set[:]
    print(f"loss {cross_entropy(model.module(inputs), targets).item():.6f}")
dist.destroy_process_group()
