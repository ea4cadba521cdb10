"""Validation: every held-out sample exactly once, whatever the world."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from app.data import Loader
from app.plan import Plan
from app.precision import Precision
from app.runtime import World
from app.tasks import Task


def validate(
    model: nn.Module, task: Task, loader: Loader, plan: Plan, world: World, precision: Precision
) -> dict[str, float]:
    """The mean loss and metrics over all validation samples. A collective.

    Args:
        plan: one step whose global batch is the whole validation set.
    """
    world.progress.enter("validation")
    was_training = model.training
    model.eval()
    names: list[str] = []
    sums = torch.zeros(0, dtype=torch.float64, device=precision.device)
    with torch.no_grad():
        for fetched in loader.validation(iter(plan.microbatches(1, world.rank))):
            with precision.autocast():
                out = task.loss(model, fetched.batch)
            names = sorted(out.metrics)
            parts = [torch.as_tensor(part) for part in (out.count, out.loss_sum, *map(out.metrics.get, names))]
            values = torch.stack([part.to(sums) for part in parts]) * fetched.microbatch.weight
            sums = values if not len(sums) else sums + values
    model.train(was_training)
    dist.all_reduce(sums)
    count, *totals = sums.tolist()
    return {name: total / count for name, total in zip(["loss", *names], totals, strict=True)}
