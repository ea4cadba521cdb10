"""One optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.data import Fetched
from app.faults.watchdog import Progress
from app.optim import rescale_gradients, update
from app.parallel import Parallel
from app.plan import Plan
from app.precision import Precision
from app.seed import seed_generators
from app.tasks import Task


class StepResult(NamedTuple):
    step: int
    numbers: Tensor  # (3,) float64 on the device: loss sum and count of this rank, norm of the whole mean gradient
    num_samples: int  # of this rank, pads excluded
    samples_digest: int  # of this rank


@dataclass(frozen=True)
class Stepper:
    """What a step needs and an attempt does not change."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    parallel: Parallel
    precision: Precision
    units_per_sample: int  # what a sample counts if nothing of it is masked
    counts_vary: bool  # samples are masked, so the true count has to be asked of all ranks
    max_grad_norm: float | None
    seed: int
    progress: Progress

    def step(self, step: int, lr: float, batches: Iterator[Fetched], plan: Plan, rank: int) -> StepResult:
        """Runs `rank`'s microbatches of `step`, sums the gradients of all ranks, and updates the weights."""
        # Loss sums are divided by this at once, which keeps gradients in range; the true count corrects it once.
        nominal = plan.global_size * self.units_per_sample
        loss_sum, count = torch.zeros(2, dtype=torch.float64, device=self.precision.device)
        num_samples = digest = 0
        for left, fetched in zip(reversed(range(plan.num_forwards(step, rank))), batches, strict=False):
            self.progress.mark("forward", left)
            weight = fetched.microbatch.weight
            seed_generators(self.seed, fetched.microbatch, self.precision.device)
            with self.parallel.synchronize(self.model, last=left == 0):
                with self.precision.autocast():
                    out = self.task.loss(self.model, fetched.batch)
                self.progress.mark("backward")
                (out.loss_sum * (weight * self.parallel.loss_scale / nominal)).backward()
            loss_sum += out.loss_sum.detach() * weight
            count += out.count * weight
            num_samples, digest = num_samples + fetched.num_samples, (digest + fetched.digest) % 2**64
        self.progress.mark("update")
        global_count: int | Tensor = plan.num_samples_in(step) * self.units_per_sample
        if self.counts_vary:
            dist.all_reduce(global_count := count.clone())
        grad_norm = rescale_gradients(self.model, nominal / global_count, self.max_grad_norm)
        update(self.optimizer, lr)
        return StepResult(step, torch.stack((loss_sum, count, grad_norm.double())), num_samples, digest)

    def rehearse(self, batch: tuple[Tensor, ...]) -> None:
        """A forward and backward thrown away, before the first step of an attempt. A collective.

        DDP lays its buckets out anew after its first backward, and with three or more ranks the layout decides in which
        order gradients are added: without a rehearsal no restart is identical to an undisturbed run.
        """
        with self.precision.autocast():
            loss = self.task.loss(self.model, batch).loss_sum
        (loss * 0.0).backward()
        self.optimizer.zero_grad(set_to_none=True)
