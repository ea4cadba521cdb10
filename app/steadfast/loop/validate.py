"""Validation on every held-out sample exactly once, in any world."""

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from steadfast.data import Fetched
from steadfast.loop.embeddings import Embeddings
from steadfast.loop.modes import evaluating
from steadfast.loop.seed import seed_validation
from steadfast.loop.totals import Totals, totals_of
from steadfast.loop.trigger import Trigger
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import Parallel
from steadfast.parallel.dtensor import reshard
from steadfast.tasks.metrics import SummedMetrics
from steadfast.tasks.own import GlobalTask
from steadfast.world.control import agree_on_names, means
from steadfast.world.runtime import Outcome, World


class Validator:
    """Measures a model on the first `num_samples` of the held-out samples, 0 for all."""

    def __init__(self, worker: WorkerState, parallel: Parallel, world: World, num_samples: int = 0) -> None:
        config = worker.config
        self._worker = worker
        self._parallel = parallel
        self._world = world
        self._plan = worker.validation_plan(world, num_samples)
        self._seed = config.run.seed
        self._config = config.checkpoint
        self._totals = totals_of(config.run.exact)
        self._step = -1  # of the last validation
        self._metrics: dict[str, float] = {}
        self._names: list[str] = []
        self.trigger = worker.trigger("validation", config.validation.every)

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return the results of the validation after `step`, if any."""
        return self._metrics if step == self._step else {}

    def resume(self, step: int, recorded: dict[str, float]) -> None:
        """Take over the validation of the restored step from an earlier attempt. A collective.

        Args:
            recorded: metrics of that validation in the events, {} if there are none; the leader's count.
        """
        if self._plan is None:
            return
        found = [recorded]
        dist.broadcast_object_list(found, src=0, group=self._world.groups.control)
        if found[0]:
            self._step, self._metrics = step, found[0]
            self._worker.hooks.on_validation(step, self._metrics, recorded=True)

    def checkpoint_trigger(self, age_s: float, is_left_on_one_node: bool) -> Trigger:
        """Return the trigger of checkpoints; the last one is `age_s` old.

        With `keep_best` a checkpoint also follows each validation. A run that had several nodes and has one left writes
        a checkpoint at once, because the loss of that node would lose the whole state.
        """
        clock = self._worker.trigger("checkpoint", self._config.every, age_s)
        if is_left_on_one_node:
            clock.hurry()
        if self._config.keep_best:
            return _AfterValidation(clock, self)
        return clock

    def run(self, step: int, model: nn.Module) -> dict[str, float]:
        """Return the mean loss and metrics of all held-out samples. A collective.

        Returns {} if no samples are held out, or if the model was already measured after `step`.
        """
        if step == self._step:
            return {}
        self._step = step
        self._metrics = self._measure(model)
        if self._metrics:
            # A hook may change which parameters train, and the root module of fsdp is still gathered.
            reshard(self._parallel.unwrap(model))
            self._worker.hooks.on_validation(step, self._metrics)
        return self._metrics

    def names(self, model: nn.Module) -> list[str]:
        """Measure, and return the names of all metrics, also of those that count nothing. A collective."""
        self._measure(model)
        return self._names

    def at_end(self, outcome: Outcome, model: nn.Module) -> dict[str, float]:
        """Validate if the run has finished, and return the results. A collective.

        Returns {} if the run has not finished, or if `run` has nothing to measure.
        """
        if outcome.kind != "finished":
            return {}
        return self.run(outcome.step, model)

    def _measure(self, model: nn.Module) -> dict[str, float]:
        if self._plan is None:
            return {}
        # A validation may take as long as many steps, so it is a phase with time-outs of its own.
        self._world.progress.enter("validation")
        model = self._parallel.unwrap(model)
        precision = self._worker.precision
        totals = self._totals(precision.device)
        metrics = SummedMetrics(self._worker.task, precision.device)
        with self._worker.hooks.validating(), evaluating(model), torch.no_grad():
            # A loss over the global batch depends on its size, so one loss is computed per global batch. Any other loss
            # is computed in a single step whose global batch is the whole validation set.
            for step in range(1, self._plan.last_step + 1):
                fetched = self._worker.loader.validation(iter(self._plan.microbatches(step, self._world.data_rank)))
                self._measure_step(step, fetched, model, metrics, totals)
        names = agree_on_names(totals.metric_names, self._world.groups.control)
        numbers = torch.cat([totals.loss_sum, totals.parts(totals.count), *totals.metrics(names)])
        self._world.groups.communicator.sum(numbers)
        self._world.groups.gate()
        found = means(("loss", *names), numbers.tolist(), totals.summation)
        results = metrics.results(self._world.groups)
        self._names = ["loss", *names, *results]
        return {"loss": math.nan} | found | results

    def _measure_step(
        self, step: int, batches: Iterator[Fetched], model: nn.Module, metrics: SummedMetrics, totals: Totals
    ) -> None:
        assert self._plan is not None
        task, precision = self._worker.task, self._worker.precision
        begin, end = self._plan.positions(step)
        embeddings = Embeddings(end - begin)
        for fetched in batches:
            microbatch, num_samples = fetched.microbatch, fetched.microbatch.stop - fetched.microbatch.start
            seed_validation(self._seed, microbatch, precision.device)
            # A pad has weight 0, so every sample counts once in any world.
            weight = microbatch.weight if self._world.counts else 0
            with precision.autocast(), metrics.counting(weight):
                if isinstance(task, GlobalTask):
                    found = task.embed(model, fetched.batch)
                    embeddings.put(found, microbatch.start - begin, num_samples, microbatch.weight)
                else:
                    totals.add(self._parallel.loss(task, model, fetched.batch), weight)
        if isinstance(task, GlobalTask):
            # Every rank computes the same loss, and only the leader's loss is added up.
            counts = int(self._world.leader)
            with metrics.counting(counts):
                totals.add(task.loss_of_embeddings(embeddings.gather(self._world.groups)), counts)


class _AfterValidation:
    """Trigger of checkpoints that also follow each validation."""

    def __init__(self, trigger: Trigger, validator: Validator) -> None:
        self._trigger = trigger
        self._validator = validator

    def due(self, step: int) -> bool:
        # The validation act precedes the checkpoint act, so a validation after this step has already run.
        return self._trigger.due(step) or bool(self._validator.metrics_of(step))

    def wanted(self) -> bool:
        return self._trigger.wanted()

    def done(self) -> None:
        self._trigger.done()
