"""Validation: every held-out sample exactly once, whatever the world."""

import torch
from torch import nn

from app.components.worker_state import WorkerState
from app.config import ValidationConfig
from app.parallel import Parallel
from app.world.runtime import World


class Validator:
    """Measures a model on the held-out samples of an attempt's world."""

    def __init__(self, config: ValidationConfig, worker: WorkerState, parallel: Parallel, world: World) -> None:
        self._worker = worker
        self._parallel = parallel
        self._world = world
        self._plan = worker.validation_plan(world.size, parallel)
        self.trigger = worker.trigger("validation", config.every)

    def run(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss and metrics over all held-out samples; nothing if none are. A collective."""
        if self._plan is None:
            return {}
        # As a phase of its own it has time-outs of its own: it may take as long as many steps.
        self._world.progress.enter("validation")
        # DDP's own forward broadcasts a model's buffers, but ranks run different numbers of forwards here.
        model = self._parallel.unwrap(model)
        was_training = model.training
        model.eval()
        precision = self._worker.precision
        names: list[str] = []
        sums = torch.zeros(0, dtype=torch.float64, device=precision.device)  # count, loss sum, metric sums
        with torch.no_grad():
            # The plan is one step whose global batch is the whole validation set.
            for fetched in self._worker.loader.validation(iter(self._plan.microbatches(1, self._world.rank))):
                with precision.autocast():
                    out = self._worker.task.loss(model, fetched.batch)
                metrics = dict(sorted(out.metrics.items()))
                names = list(metrics)
                parts = [out.count, out.loss_sum, *metrics.values()]
                values = torch.stack([torch.as_tensor(part).to(sums) for part in parts])
                # A pad has weight 0: every sample counts once, whatever the world.
                values = values * fetched.microbatch.weight
                sums = sums + values if len(sums) else values
        model.train(was_training)
        self._world.groups.communicator.sum(sums)
        self._world.groups.gate()
        count, *totals = sums.tolist()
        return {name: total / count for name, total in zip(["loss", *names], totals, strict=True)}
