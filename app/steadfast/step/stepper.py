"""One optimizer step."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from steadfast.data import Fetched
from steadfast.data.parts import Part, split
from steadfast.guards.out_of_memory import halve_microbatch
from steadfast.loop.buffers import StepBuffers
from steadfast.loop.seed import seed_generators
from steadfast.loop.totals import Totals, totals_of
from steadfast.loop.worker_state import WorkerState
from steadfast.optim.optimizer import rescale_gradients, set_learning_rates
from steadfast.optim.schedule import build_schedule
from steadfast.parallel import Parallel
from steadfast.plan import Microbatch, Plan
from steadfast.tasks import Sums, Task
from steadfast.world.control import StepResult
from steadfast.world.runtime import World


class Stepper:
    """Runs the optimizer steps of one attempt.

    Args:
        worker: data, optimizer and settings of this process.
        task: the worker's task, or a wrapper that injects faults into the task.
        model: the wrapped model to train.
    """

    def __init__(
        self, worker: WorkerState, task: Task, world: World, plan: Plan, parallel: Parallel, model: nn.Module
    ) -> None:
        config = worker.config
        self.model = model
        self._world = world
        self._task: Any = task
        self._plan = plan
        self._parallel = parallel
        self._fetch_ahead = worker.loader.fetch_ahead
        self._optimizer = worker.optimizer
        self._precision = worker.precision
        self._schedule = build_schedule(config.schedule, worker.num_steps)
        self._units_per_sample = worker.units_per_sample  # count of a sample in which nothing is masked
        self._counts_vary = worker.counts_vary  # samples are masked, so the ranks must add up the true count
        self._max_grad_norm = config.optimizer.max_grad_norm
        self._seed = config.run.seed
        # Samples of a microbatch share a forward if their losses depend on each other.
        self._coupled = config.task.coupled
        self._totals = totals_of(config.run.exact)(self._precision.device)
        # These two exist only if the model or the configuration needs them; before the first step nothing is known.
        self._buffers: StepBuffers | None = StepBuffers(worker, parallel.unwrap(model), parallel.survivors_hold_all)
        self._compiled = worker.compiled if worker.compiled.wanted else None

    @property
    def _nominal(self) -> int:
        """Return the loss count of a whole step without masking."""
        return self._plan.global_size * self._units_per_sample

    def step(self, step: int, batches: Iterator[Fetched]) -> StepResult:
        """Run this rank's microbatches of `step` and update the weights."""
        totals = self._totals
        if step in self._plan.skip:
            nothing = torch.zeros(totals.summation.width + 2, dtype=torch.float64)
            return StepResult(step, nothing, num_samples=0, samples_digest=0, summation=totals.summation)
        began_s = perf_counter()
        waited_s = self._world.progress.spent_s("loader")
        totals.begin()
        num_samples = digest = 0  # of this rank
        losses: list[tuple[Microbatch, Tensor, Tensor | int]] = []
        num_left = reversed(range(self._plan.num_forwards(step, self._world.data_rank)))
        with self._begin(step):
            # `num_left` is the first argument, because zip would otherwise take a batch of the next step from the
            # iterator before it notices the end of this step.
            for left, fetched in zip(num_left, self._batches_of(step, batches), strict=False):
                self._world.progress.mark("forward", left)
                loss_sum, count = self._run_microbatch(fetched, totals, last=left == 0)
                if fetched.microbatch.weight:
                    losses.append((fetched.microbatch, loss_sum, count))
                if self._world.counts:
                    num_samples += fetched.num_samples
                    # A sum does not depend on which rank trains on which samples.
                    digest = (digest + fetched.digest) % 2**64
            lr = set_learning_rates(self._optimizer, self._schedule, step)
            global_count, grad_norm, grad_norms = self._whole_gradient(step, totals)
            names = totals.metric_names
            beside = torch.stack([totals.count, grad_norm.double()])
            numbers = torch.cat([totals.loss_sum, beside, *totals.metrics(names)])
            # Only complete gradients may change the weights. No collective may follow in the step: a survivor that
            # loses a peer in one would already hold the weights of this step, and would apply the step a second time.
            # What can be launched is launched before: the device is idle behind the gate until the update.
            self._world.groups.gate()
            self._parallel.detach_unused()
        self._world.progress.mark("update")
        if self._buffers is not None:
            self._buffers.finish()
            if not self._buffers.is_needed:
                self._buffers = None
        # A step in which everything is masked has no gradient, and weight decay or momentum alone would still move the
        # weights. Reading the count is free here, because the host has just waited for the device. A count of NaN
        # compares false too, and ends the run once its message is read.
        overflowed = bool(global_count > 0) and self._precision.update(self._optimizer, grad_norm)
        self._parallel.clear_gradients(self._optimizer)
        return StepResult(
            step,
            numbers,
            num_samples,
            digest,
            tuple(names),
            grad_norms,
            lr,
            overflowed=overflowed,
            seconds=perf_counter() - began_s,
            data_s=self._world.progress.spent_s("loader") - waited_s,
            losses=tuple(losses),
            summation=totals.summation,
        )

    def _begin(self, step: int) -> AbstractContextManager[object]:
        """Begin a step, while all gradients are zero.

        Returns the context of its microbatches and collectives.
        """
        if self._buffers is None:
            return nullcontext()
        return self._buffers.step(self._plan.num_microbatches_in(step))

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
        seed_generators(self._seed, fetched.microbatch, self._precision.device)
        parts = self._parts_of(fetched)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._precision.device)
        count: Tensor | int = 0
        for left, part in zip(reversed(range(len(parts))), parts, strict=True):
            try:
                sums = self._run(part, last=last and left == 0)
            except torch.OutOfMemoryError as error:
                raise halve_microbatch(part.num_samples, error, self._coupled) from error
            if self._world.counts:
                totals.add(sums, part.weight)
            loss_sum += sums.loss_sum.detach() * part.weight
            count = count + sums.count * part.weight
        return loss_sum, count

    def _parts_of(self, fetched: Fetched) -> list[Part]:
        """Split a microbatch into parts, each for one forward.

        The only part is the whole microbatch until memory has run out.
        """
        microbatch = fetched.microbatch
        num_samples = microbatch.stop - microbatch.start
        size = self._world.amendments.forward_size
        if size is None:
            return [Part(microbatch, fetched.batch, 0, num_samples, 1.0, microbatch.weight)]
        # A forward of a sharded model is a collective, so all ranks must run as many, even for a short microbatch.
        longest = self._plan.microbatch_size if self._plan.shard_size > 1 else num_samples
        return list(split(fetched, size, num_parts=-(-longest // size)))

    def _run(self, part: Part, last: bool) -> Sums:
        # A pad has weight 0: it makes this rank run the same collectives as its peers.
        with self._around(part), self._parallel.synchronize(self.model, last):
            with self._precision.autocast():
                sums = self._loss_of(part)
            if self._buffers is not None:
                self._buffers.forwarded(part)
            self._world.progress.mark("backward")
            # gradient = sum over ranks and microbatches of d(loss_sum)/dw / nominal
            # The true count is known only when all ranks have run. Dividing by the nominal one keeps gradients in
            # range until then.
            self._parallel.backward(sums.loss_sum * (part.weight * self._parallel.loss_scale / self._nominal))
        return sums

    def _around(self, part: Part) -> AbstractContextManager[object]:
        """Return the context of a forward and its backward."""
        around = ExitStack()
        if self._buffers is not None:
            around.enter_context(self._buffers.forward(part))
        if self._compiled is not None:
            is_full = part.num_samples == (self._world.amendments.forward_size or self._plan.microbatch_size)
            around.enter_context(self._compiled.running(is_full))
        return around

    def _buffers_undone(self) -> AbstractContextManager[None]:
        """Return a context whose forwards change no buffer."""
        return nullcontext() if self._buffers is None else self._buffers.undone()

    def _loss_of(self, part: Part) -> Sums:
        return self._parallel.loss(self._task, self.model, part.batch)

    def _whole_gradient(self, step: int, totals: Totals) -> tuple[int | Tensor, Tensor, Tensor]:
        """Complete the gradients of a step: sum, divide by its count, clip.

        A collective.

        Returns:
            the count of the step; the norm of the whole gradient before clipping, (); and the norms of the parameters'
            gradients, sharded as the parameters are.
        """
        # Fetched while the device computes and peers are awaited. Behind the gate the device would idle meanwhile.
        self._world.progress.mark("loader")
        self._fetch_ahead()
        self._world.progress.mark("gradients")
        global_count = self._global_count(step, totals.count)
        if self._buffers is not None:
            self._buffers.send(self._world.groups)
        self._wait_for_sums()
        self._parallel.store_gradients()
        # gradient * nominal / count = the mean over everything that counts, on all ranks. A count of 0 would divide by
        # 0; its gradients are 0 and are not applied.
        correction = self._nominal / (global_count + (global_count == 0))
        grad_norm, grad_norms = rescale_gradients(
            self.model, self._precision, correction, self._max_grad_norm, self._parallel.whole_norms
        )
        return global_count, grad_norm, grad_norms

    def _wait_for_sums(self) -> None:
        self._world.groups.communicator.wait()

    def _global_count(self, step: int, count: Tensor) -> int | Tensor:
        """Return the number of losses in the step, over all ranks.

        A collective if samples are masked; the number is then complete after a wait.
        """
        if not self._counts_vary:
            return self._plan.num_samples_in(step) * self._units_per_sample
        global_count = count.clone()
        self._world.groups.communicator.sum(global_count)
        return global_count
