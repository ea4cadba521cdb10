"""One optimizer step."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.components.buffers import Buffers, RunningStatistics
from app.components.optimizer import rescale_gradients, set_learning_rates
from app.components.schedule import Schedule
from app.components.seed import seed_generators
from app.data import Fetched
from app.data.batches import Batch
from app.parallel import Parallel
from app.parallel.precision import Precision
from app.plan import Plan
from app.tasks import Sums, Task
from app.world.control import StepResult
from app.world.runtime import World


@dataclass
class Stepper:
    """What a step needs and an attempt does not change."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    parallel: Parallel
    precision: Precision
    schedule: Schedule
    plan: Plan
    world: World
    units_per_sample: int  # what a sample counts if nothing of it is masked
    counts_vary: bool  # samples are masked, so the true count has to be asked of all ranks
    max_grad_norm: float | None
    seed: int
    _metric_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self._buffers = Buffers(self.model)
        self._statistics = RunningStatistics(self.model)

    def step(self, step: int, batches: Iterator[Fetched]) -> StepResult:
        """Run this rank's microbatches of `step`, sum the gradients of all ranks, and update the weights."""
        if step in self.plan.skip:
            return StepResult(step, torch.zeros(3, dtype=torch.float64), num_samples=0, samples_digest=0)
        began_s = perf_counter()
        # Each microbatch's loss sum is divided by the count that the step would have if nothing were masked, which
        # keeps gradients in range. nominal = samples of the global batch * units of a sample
        nominal = self.plan.global_size * self.units_per_sample
        totals = _Totals(self.precision.device)
        num_left = reversed(range(self.plan.num_forwards(step, self.world.rank)))
        # A survivor of a step that breaks does it again: its forwards must not count twice in running statistics.
        with self._buffers.undone_on_failure():
            self._statistics.begin(self.plan.num_microbatches_in(step))
            for left, fetched in zip(num_left, batches, strict=False):
                self.world.progress.mark("forward", left)
                # 0 for a pad, which keeps a rank in step with the others' collectives.
                weight = fetched.microbatch.weight
                seed_generators(self.seed, fetched.microbatch, self.precision.device)
                with self.parallel.synchronize(self.model, last=left == 0):
                    with self.precision.autocast():
                        sums = self.task.loss(self.model, fetched.batch)
                    self._statistics.forwarded(fetched.microbatch)
                    self.world.progress.mark("backward")
                    # gradient = sum over ranks and microbatches of d(loss_sum)/dw / nominal
                    self.precision.backward(sums.loss_sum * (weight * self.parallel.loss_scale / nominal))
                self._statistics.put_back()
                totals.add(sums, fetched)
            self.world.progress.mark("gradients")
            global_count = self._global_count(step, totals.count)
            metric_names = self._agreed_metric_names(totals.metrics)
            self._statistics.send(self.world.groups.communicator)
            self.world.groups.communicator.wait()
            # ... * nominal / count = the mean over everything that counts, wherever it was computed
            grad_norm, grad_norms = rescale_gradients(
                self.model, self.precision, nominal / global_count, self.max_grad_norm
            )
            lr = set_learning_rates(self.optimizer, self.schedule, step)
            # Only gradients that are whole go into the weights. No collective may follow in the step: a survivor whose
            # peer is lost in one would hold the weights of this step and go on from the one before, doing this one
            # twice.
            self.world.groups.gate()
        self.world.progress.mark("update")
        self._statistics.finish()
        self.precision.update(self.optimizer)
        self.parallel.clear_gradients(self.optimizer)
        numbers = [totals.loss_sum, totals.count, grad_norm.double()]
        numbers += [totals.metrics.get(name, torch.zeros_like(totals.count)) for name in metric_names]
        seconds = perf_counter() - began_s
        return StepResult(
            step, torch.stack(numbers), totals.num_samples, totals.digest, metric_names, grad_norms, lr, seconds
        )

    def _global_count(self, step: int, count: Tensor) -> int | Tensor:
        """Return what the whole step counts. A collective where samples are masked, whose sum is there after a wait."""
        if not self.counts_vary:
            return self.plan.num_samples_in(step) * self.units_per_sample
        global_count = count.clone()
        self.world.groups.communicator.sum(global_count)
        return global_count

    def _agreed_metric_names(self, metrics: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Return the names of the metrics that any rank has in the attempt's first step, the same on every rank."""
        # Ranks add their numbers up by place, so a metric that one microbatch has and another lacks must have one too.
        # Asked once only: an exchange of objects takes longer than the step of a small model.
        if self._metric_names is None:
            by_rank: list[Any] = [None] * self.world.size
            dist.all_gather_object(by_rank, sorted(metrics), group=self.world.groups.control)
            self._metric_names = tuple(dict.fromkeys(chain.from_iterable(by_rank)))
        return self._metric_names

    def warm_up(self, batch: Batch) -> None:
        """Run a forward and backward that are thrown away, before the first step of an attempt. A collective."""
        # DDP lays its buckets out anew after its first backward, and with three or more ranks the layout decides in
        # which order gradients are added: without a warm-up no restart is identical to an undisturbed run.
        if not self.parallel.rebuilds_buckets:
            return
        # Statistics of normalization layers must not learn from it.
        with self._buffers.undone():
            with self.precision.autocast():
                loss = self.task.loss(self.model, batch).loss_sum
            self.precision.backward(loss * 0.0)
        self.parallel.clear_gradients(self.optimizer)


class _Totals:
    """What a rank's microbatches of one step add up to: () float64 each."""

    # On the device: to read a loss after each microbatch would make the host wait where it should run ahead.
    def __init__(self, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.metrics: dict[str, Tensor] = {}
        self.num_samples = 0
        self.digest = 0

    def add(self, sums: Sums, fetched: Fetched) -> None:
        weight = fetched.microbatch.weight
        self.loss_sum += sums.loss_sum.detach() * weight
        self.count += sums.count * weight
        for name, value in sums.metrics.items():
            total = torch.as_tensor(value, device=self.count.device).detach().double() * weight
            if name in self.metrics:
                total = self.metrics[name] + total
            self.metrics[name] = total
        self.num_samples += fetched.num_samples
        self.digest = (self.digest + fetched.digest) % 2**64
