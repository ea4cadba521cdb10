"""One optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.data import Fetched
from app.optim import rescale_gradients
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
    """What a step needs and an attempt does not change.

    Args:
        units_per_sample: what a sample counts if nothing of it is masked. Loss sums are divided by this nominal count
            at once, which keeps gradients in range whatever the precision; the true count corrects it once, at the end.
        counts_vary: whether samples are masked, so that the true count has to be asked of all ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    parallel: Parallel
    precision: Precision
    units_per_sample: int
    counts_vary: bool
    max_grad_norm: float | None
    seed: int

    def step(self, step: int, lr: float, batches: Iterator[Fetched], plan: Plan, rank: int) -> StepResult:
        """Runs `rank`'s microbatches of `step`, sums the gradients of all ranks, and updates the weights."""
        nominal = plan.global_size * self.units_per_sample
        loss_sum, count = torch.zeros(2, dtype=torch.float64, device=self.precision.device)
        num_samples = digest = 0
        for left, fetched in zip(reversed(range(plan.num_forwards(rank))), batches, strict=False):
            weight = fetched.microbatch.weight
            seed_generators(self.seed, fetched.microbatch, self.precision.device)
            with self.parallel.synchronize(self.model, last=left == 0):
                with self.precision.autocast():
                    out = self.task.loss(self.model, fetched.batch)
                (out.loss_sum * (weight * self.parallel.loss_scale / nominal)).backward()
            if weight:
                loss_sum += out.loss_sum.detach()
                count += out.count
            num_samples += fetched.num_samples
            digest = (digest + fetched.digest) & ((1 << 64) - 1)

        correction = nominal / (plan.num_samples_in(step) * self.units_per_sample)
        if self.counts_vary:
            global_count = count.clone()
            dist.all_reduce(global_count)
            correction = nominal / global_count
        grad_norm = rescale_gradients(self.model, correction, self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(step, torch.stack((loss_sum, count, grad_norm.double())), num_samples, digest)

    def rehearse(self, batch: tuple[Tensor, ...]) -> None:
        """One forward and backward whose gradients are thrown away, before the first step of an attempt. A collective.

        DDP lays its buckets out anew after the first backward of a process group, and with three or more ranks the
        layout decides in which order gradients are added. After a rehearsal every step of every attempt has the final
        layout, without which no restart could be identical to a run that was not disturbed.
        """
        with self.precision.autocast():
            loss = self.task.loss(self.model, batch).loss_sum
        (loss * 0.0).backward()
        self.optimizer.zero_grad(set_to_none=True)
