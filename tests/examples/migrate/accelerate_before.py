"""Digits by Accelerate: accelerate launch accelerate_before.py"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
train_set, test_set = TensorDataset(*digits[:1536]), TensorDataset(*digits[1536:])

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 96)
loader = DataLoader(train_set, batch_size=32)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

for _ in range(4):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), targets, label_smoothing=0.1)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    accelerator.save_state("state")

inputs, targets = test_set[:]
accelerator.print(f"loss {cross_entropy(model(inputs), targets, label_smoothing=0.1).item():.6f}")
