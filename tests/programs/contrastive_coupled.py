"""A contrastive loss whose negatives are the other samples of the microbatch, which `task.coupled` keeps together."""

from __future__ import annotations

import torch

from tests.programs.contrastive import Model, Task, contrast, data
from tests.programs.program import GLOBAL_SIZE, Program, Trained, batches, build

__all__ = ["Model", "Task", "data"]


def plain() -> Trained:
    model, dataset, losses = build(Model), data(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _, microbatches in batches(len(dataset)):
        optimizer.zero_grad()
        loss = torch.stack([contrast(*model(*dataset[ids])) for ids in microbatches]).sum() / GLOBAL_SIZE
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained.of(losses, model)


PROGRAM = Program(
    __name__,
    "contrastive loss, negatives of the microbatch",
    plain,
    words=("task.coupled=true",),
    advice="`task.coupled: true`",
)
