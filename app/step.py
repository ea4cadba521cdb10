"""One optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.data import Fetched
from app.optim import rescale_gradients
from app.parallel import Parallel
from app.precision import Precision
from app.seed import seed_generators
from app.tasks import Task


class StepResult(NamedTuple):
    step: int
    numbers: Tensor  # (3,) float64 on the device: global loss sum, global count, norm of the mean gradient
    num_samples: int  # of this rank, pads excluded
    samples_digest: int  # of this rank


@dataclass(frozen=True)
class Stepper:
    """What a step needs and an attempt does not change.

    Args:
        nominal_count: what the global batch would count if nothing were masked. Loss sums are divided by it at once,
            which keeps gradients in range whatever the precision; the true count corrects it once, after the sum.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    parallel: Parallel
    precision: Precision
    nominal_count: int
    max_grad_norm: float | None
    seed: int

    def step(self, step: int, lr: float, batches: Iterator[Fetched], num_forwards: int) -> StepResult:
        """Runs this rank's microbatches of `step`, sums the gradients of all ranks, and updates the weights."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.precision.device)
        num_samples = digest = 0
        for index, fetched in enumerate(islice(batches, num_forwards)):
            last = index == num_forwards - 1
            seed_generators(self.seed, fetched.microbatch, self.precision.device)
            with self.parallel.synchronize(self.model, last):
                with self.precision.autocast():
                    out = self.task.loss(self.model, fetched.batch)
                weight = fetched.microbatch.weight
                sums += torch.stack([out.loss_sum.detach().to(sums), torch.as_tensor(out.count).to(sums)]) * weight
                if last:  # under way while the last backward runs
                    summing = dist.all_reduce(sums, async_op=True)
                (out.loss_sum * (weight * self.parallel.loss_scale / self.nominal_count)).backward()
            num_samples += fetched.num_samples
            digest = (digest + fetched.digest) & ((1 << 64) - 1)
        summing.wait()

        grad_norm = rescale_gradients(self.model, self.nominal_count / sums[1], self.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(step, torch.cat((sums, grad_norm.double().reshape(1))), num_samples, digest)

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
