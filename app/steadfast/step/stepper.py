"""One optimizer step."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Self

import torch
from torch import Tensor, nn

from steadfast.data import Fetched
from steadfast.data.parts import Part, split
from steadfast.errors import TrainingError
from steadfast.guards.out_of_memory import halve_microbatch
from steadfast.loop.buffers import Buffers, RunningStatistics
from steadfast.loop.seed import seed_generators
from steadfast.loop.totals import Totals
from steadfast.loop.worker_state import WorkerState
from steadfast.optim.optimizer import rescale_gradients, set_learning_rates
from steadfast.optim.schedule import Schedule, build_schedule
from steadfast.parallel import Parallel
from steadfast.parallel.compiled import CompiledBlocks
from steadfast.parallel.precision import Precision
from steadfast.plan import Microbatch, Plan
from steadfast.tasks import Sums, Task
from steadfast.world.control import StepResult, agree_on_names
from steadfast.world.runtime import World
from steadfast.world.sums import summation


@dataclass
class Stepper:
    """Runs the optimizer steps of one attempt."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    task: Task
    parallel: Parallel
    precision: Precision
    schedule: Schedule
    plan: Plan
    world: World
    units_per_sample: int  # count of a sample in which nothing is masked
    counts_vary: bool  # samples are masked, so the ranks must add up the true count
    max_grad_norm: float | None
    seed: int
    exact: bool  # the result has the same bits, whichever ranks run which microbatches
    coupled: bool  # samples of a microbatch share a forward, because their losses depend on each other
    compiled: CompiledBlocks
    _metric_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self._buffers = Buffers(self.model)
        self._statistics = RunningStatistics(self.model)
        self._summation = summation(self.exact)

    @classmethod
    def of(cls, worker: WorkerState, world: World, plan: Plan, parallel: Parallel, model: nn.Module) -> Self:
        """Return the stepper of an attempt, which trains the wrapped `model`."""
        config = worker.config
        return cls(
            model,
            worker.optimizer,
            worker.task,
            parallel,
            worker.precision,
            build_schedule(config.schedule, worker.num_steps),
            plan,
            world,
            units_per_sample=worker.units_per_sample,
            counts_vary=worker.counts_vary,
            max_grad_norm=config.optimizer.max_grad_norm,
            seed=config.run.seed,
            exact=config.run.exact,
            coupled=config.task.coupled,
            compiled=worker.compiled,
        )

    @property
    def _nominal(self) -> int:
        """Return the loss count of a whole step without masking."""
        return self.plan.global_size * self.units_per_sample

    def step(self, step: int, batches: Iterator[Fetched]) -> StepResult:
        """Run this rank's microbatches of `step` and update the weights."""
        if step in self.plan.skip:
            nothing = torch.zeros(self._summation.width + 2, dtype=torch.float64)
            return StepResult(step, nothing, num_samples=0, samples_digest=0, summation=self._summation)
        began_s = perf_counter()
        waited_s = self.world.progress.spent_s("loader")
        totals = Totals(self.precision.device, self._summation)
        num_samples = digest = 0  # of this rank
        losses: list[tuple[Microbatch, Tensor, Tensor | int]] = []
        num_left = reversed(range(self.plan.num_forwards(step, self.world.rank)))
        # A survivor of a failed step runs that step again, and its forwards must count once in running statistics.
        with self._buffers.undone_on_failure():
            self._begin(step)
            # `num_left` is the first argument, because zip would otherwise take a batch of the next step from the
            # iterator before it notices the end of this step.
            for left, fetched in zip(num_left, self._batches_of(step, batches), strict=False):
                self.world.progress.mark("forward", left)
                loss_sum, count = self._run_microbatch(fetched, totals, last=left == 0)
                if fetched.microbatch.weight:
                    losses.append((fetched.microbatch, loss_sum, count))
                num_samples += fetched.num_samples
                # A sum does not depend on which rank trains on which samples.
                digest = (digest + fetched.digest) % 2**64
            global_count, grad_norm, grad_norms = self._whole_gradient(step, totals)
            lr = set_learning_rates(self.optimizer, self.schedule, step)
        self.world.progress.mark("update")
        self._statistics.finish()
        # A step in which everything is masked has no gradient, and weight decay or momentum alone would still move the
        # weights. Reading the count is free here, because the host has just waited for the device. A count of NaN
        # compares false too, and ends the run once its message is read.
        overflowed = bool(global_count > 0) and self.precision.update(self.optimizer, grad_norm)
        self.parallel.clear_gradients(self.optimizer)
        names = self._metric_names or ()
        beside = torch.stack([totals.count, grad_norm.double()])
        return StepResult(
            step,
            torch.cat([totals.loss_sum, beside, *totals.metrics(names)]),
            num_samples,
            digest,
            names,
            grad_norms,
            lr,
            overflowed=overflowed,
            seconds=perf_counter() - began_s,
            data_s=self.world.progress.spent_s("loader") - waited_s,
            losses=tuple(losses),
            summation=self._summation,
        )

    def _begin(self, step: int) -> None:
        """Begin a step, while all gradients are zero."""
        self._buffers.begin()
        self._statistics.begin(self.plan.num_microbatches_in(step))

    def _batches_of(self, step: int, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        """Return an iterator whose first items are this rank's microbatches of `step`."""
        return batches

    def _run_microbatch(self, fetched: Fetched, totals: Totals, last: bool) -> tuple[Tensor, Tensor | int]:
        """Run a microbatch's forwards and backwards, and add to `totals`.

        The gradients are summed over ranks after the `last` microbatch of a step. Returns the sum of the microbatch's
        losses, (), and their count.

        Raises:
            OutOfMemory: a forward or backward has run out of memory.
        """
        seed_generators(self.seed, fetched.microbatch, self.precision.device)
        parts = self._parts_of(fetched)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.precision.device)
        count: Tensor | int = 0
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            try:
                sums = self._run(part, last=last and left == 0)
            except torch.OutOfMemoryError as error:
                raise halve_microbatch(part.num_samples, error, self.coupled) from error
            totals.add(sums, part.weight)
            loss_sum += sums.loss_sum.detach() * part.weight
            count = count + sums.count * part.weight
        return loss_sum, count

    def _parts_of(self, fetched: Fetched) -> list[Part]:
        """Cut a microbatch into the parts that run in one forward each."""
        size = self.world.amendments.forward_size
        num_parts = 1
        if size is not None:
            # A forward of a sharded model is a collective, so all ranks must run as many, even for a short microbatch.
            start, stop = fetched.microbatch.start, fetched.microbatch.stop
            longest = self.plan.microbatch_size if self.plan.replica_size > 1 else stop - start
            num_parts = -(-longest // size)
        return list(split(fetched, size, num_parts))

    def _run(self, part: Part, last: bool) -> Sums:
        # A pad has weight 0: it makes this rank run the same collectives as its peers.
        unchanged = nullcontext() if part.weight else self._buffers.undone()
        is_full = part.num_samples == (self.world.amendments.forward_size or self.plan.microbatch_size)
        with unchanged, self.compiled.running(is_full), self.parallel.synchronize(self.model, last):
            with self.precision.autocast():
                sums = self._loss_of(part)
            self._statistics.forwarded(part.microbatch, part.share)
            self.world.progress.mark("backward")
            # gradient = sum over ranks and microbatches of d(loss_sum)/dw / nominal
            # The true count is known only when all ranks have run. Dividing by the nominal one keeps gradients in
            # range until then.
            self.precision.backward(sums.loss_sum * (part.weight * self.parallel.loss_scale / self._nominal))
        self._statistics.put_back()
        return sums

    def _loss_of(self, part: Part) -> Sums:
        return self.task.loss(self.model, part.batch)

    def _whole_gradient(self, step: int, totals: Totals) -> tuple[int | Tensor, Tensor, Tensor]:
        """Complete the gradients of a step: sum, divide by its count, clip.

        A collective.

        Returns:
            the count of the step; the norm of the whole gradient before clipping, (); and the norms of the parameters'
            gradients, sharded as the parameters are.
        """
        self.world.progress.mark("gradients")
        global_count = self._global_count(step, totals.count)
        # Agreed on once, because an exchange of objects takes longer than the step of a small model.
        if self._metric_names is None:
            self._metric_names = agree_on_names(totals.metric_names, self.world.groups.control)
        self._buffers.send(self.world.groups)
        if self.exact and self._buffers.changing:
            raise TrainingError(
                f"run.exact: a forward changes the model's buffer {self._buffers.changing[0]}, whose value then comes "
                "from the leader's microbatches, and so depends on the number of workers. Set run.exact=false"
            )
        self._statistics.send(self.world.groups.communicator)
        self._wait_for_sums()
        self.parallel.store_gradients()
        # gradient * nominal / count = the mean over everything that counts, on all ranks. A count of 0 would divide by
        # 0; its gradients are 0 and are not applied.
        correction = self._nominal / (global_count + (global_count == 0))
        grad_norm, grad_norms = rescale_gradients(self.model, self.precision, correction, self.max_grad_norm)
        # Only complete gradients may change the weights. No collective may follow in the step: a survivor that loses a
        # peer in one would already hold the weights of this step, and would apply the step a second time.
        self.world.groups.gate()
        self.parallel.detach_unused()
        return global_count, grad_norm, grad_norms

    def _wait_for_sums(self) -> None:
        self.world.groups.communicator.wait()

    def _global_count(self, step: int, count: Tensor) -> int | Tensor:
        """Return the count of the whole step.

        A collective if samples are masked; the count is then complete after a wait.
        """
        if not self.counts_vary:
            return self.plan.num_samples_in(step) * self.units_per_sample
        global_count = count.clone()
        self.world.groups.communicator.sum(global_count)
        return global_count
