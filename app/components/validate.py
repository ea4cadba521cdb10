"""Validation: every held-out sample exactly once, whatever the world."""

import torch
from torch import nn

from app.components.modes import evaluating
from app.components.trigger import Trigger
from app.components.worker_state import WorkerState
from app.config import Config
from app.parallel import Parallel
from app.world.runtime import World


class Validator:
    """Measures a model on the held-out samples of an attempt's world."""

    def __init__(self, config: Config, worker: WorkerState, parallel: Parallel, world: World) -> None:
        self._worker = worker
        self._parallel = parallel
        self._world = world
        self._plan = worker.validation_plan(world.size, parallel)
        self._keeps_best = config.checkpoint.keep_best is not None
        self._step = -1  # of the last validation
        self._metrics: dict[str, float] = {}
        self.trigger = worker.trigger("validation", config.validation.every)

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return what the validation after `step` has measured; nothing if there was none."""
        return self._metrics if step == self._step else {}

    def due_with(self, checkpoint: Trigger) -> Trigger:
        """Return a trigger of checkpoints that follows validations too, where the best ones are to be kept."""
        return _AfterValidation(checkpoint, self) if self._keeps_best else checkpoint

    def run(self, step: int, model: nn.Module) -> dict[str, float]:
        """Return the mean loss and metrics of all samples held out, after `step`; {} if none are. A collective."""
        self._step = step
        self._metrics = self._measure(model)
        return self._metrics

    def _measure(self, model: nn.Module) -> dict[str, float]:
        if self._plan is None:
            return {}
        # As a phase of its own it has time-outs of its own: it may take as long as many steps.
        self._world.progress.enter("validation")
        model = self._parallel.unwrap(model)
        precision = self._worker.precision
        names: list[str] = []
        sums = torch.zeros(0, dtype=torch.float64, device=precision.device)  # count, loss sum, metric sums
        with evaluating(model), torch.no_grad():
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
        self._world.groups.communicator.sum(sums)
        self._world.groups.gate()
        count, *totals = sums.tolist()
        return {name: total / count for name, total in zip(["loss", *names], totals, strict=True)}


class _AfterValidation:
    """The trigger of checkpoints that follow each validation, beside their own times."""

    def __init__(self, trigger: Trigger, validator: Validator) -> None:
        self._trigger = trigger
        self._validator = validator

    def due(self, step: int) -> bool:
        # The validation after this step is over by now: its act comes first.
        return self._trigger.due(step) or bool(self._validator.metrics_of(step))

    def wanted(self) -> bool:
        return self._trigger.wanted()

    def done(self) -> None:
        self._trigger.done()
