"""Optimizer step of a loss over the whole global batch."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from steadfast.data import Fetched
from steadfast.data.batches import tensors_of
from steadfast.data.parts import Part
from steadfast.errors import UsageError
from steadfast.guards.out_of_memory import halve_microbatch
from steadfast.loop.embeddings import Embeddings
from steadfast.loop.seed import seed_generators
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import Parallel
from steadfast.plan import Microbatch, Plan
from steadfast.step.stepper import Stepper
from steadfast.tasks import Sums, Task
from steadfast.tasks.own import GlobalTask
from steadfast.world.runtime import World


class GlobalStepper(Stepper):
    """Stepper by the method of GradCache, applied to ranks and microbatches.

    First every rank embeds its microbatches without gradients, and the embeddings of all ranks are gathered in the
    order of the grid. Then each rank computes the loss of the whole table and its gradient, which is the same on all
    ranks. At last each rank embeds its microbatches again, with the same random draws, and the backward of each
    microbatch continues from its rows of that gradient. So the loss sees the whole global batch, whatever the number of
    workers. Source: Gao et al. 2021, arXiv:2101.06983.
    """

    _start: int  # position of the first sample of the step
    _sums: Sums  # of the step
    _gradients: list[Tensor | None]  # one per tensor of the embeddings

    def _batches_of(self, step: int, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        own = list(islice(batches, self._plan.num_forwards(step, self._world.data_rank)))
        self._differentiate(step, self._embed(step, own))
        return iter(own)

    def _embed(self, step: int, own: list[Fetched]) -> Embeddings:
        """Embed this rank's microbatches without gradients."""
        self._start, end = self._plan.positions(step)
        embeddings = Embeddings(end - self._start)
        with torch.no_grad(), self._buffers_undone():
            for fetched in own:
                self._world.progress.mark("forward")
                seed_generators(self._seed, fetched.microbatch, self._precision.device)
                for part in self._parts_of(fetched):
                    try:
                        with self._precision.autocast():
                            found = self._task.embed(self.model, part.batch)
                    except torch.OutOfMemoryError as error:
                        raise halve_microbatch(part.num_samples, error, self._coupled) from error
                    embeddings.put(found, self._row(part), part.num_samples, part.weight)
        return embeddings

    def _differentiate(self, step: int, embeddings: Embeddings) -> None:
        """Compute the loss of all ranks' embeddings and its gradient. A collective."""
        self._world.progress.mark("gradients")
        whole = embeddings.gather(self._world.groups)
        # The gathered tables become leaves with gradients, at which the first backward stops. Integers, such as labels
        # beside the embeddings, have no gradient.
        wanted = [tensor.requires_grad_() for tensor in embeddings.tensors if tensor.is_floating_point()]
        # The random draws of the loss are keyed as those of a microbatch after the last one of the step.
        behind = Microbatch(step, self._plan.grid_size, self._start, self._start)
        seed_generators(self._seed, behind, self._precision.device)
        sums = self._task.loss_of_embeddings(whole)
        if not sums.loss_sum.requires_grad:
            raise UsageError("the task's loss(embeddings) does not depend on the embeddings, so nothing can be learned")
        found = iter(torch.autograd.grad(sums.loss_sum, wanted, allow_unused=True))
        self._gradients = []
        for tensor in embeddings.tensors:
            gradient = next(found) if tensor.requires_grad else None
            self._gradients.append(gradient)
        self._sums = replace(sums, loss_sum=sums.loss_sum.detach())

    def _loss_of(self, part: Part) -> Sums:
        """Return a loss of value 0 with the gradient of this part.

        The gradient is that of the step's loss through the embeddings of this part.

        The grid's first microbatch, which one rank runs, carries the value, count and metrics of the step.
        """
        row = self._row(part)
        inner = self._sums.loss_sum.new_zeros(())
        embeddings = self._task.embed(self.model, part.batch)
        for tensor, gradient in zip(tensors_of(embeddings), self._gradients, strict=True):
            if gradient is not None:
                rows = gradient[row : row + part.num_samples]
                inner = inner + (tensor.to(rows.dtype) * rows).sum()
        # The derivative of `inner` by an embedding is that embedding's row of the loss's gradient, so the backward
        # continues the chain rule. The difference has the value 0 and the same derivative.
        nothing = inner - inner.detach()
        if part.microbatch.index == 0 and part.first == 0 and part.weight:
            return replace(self._sums, loss_sum=nothing + self._sums.loss_sum)
        return Sums(nothing, 0)

    def _row(self, part: Part) -> int:
        return part.microbatch.start - self._start + part.first


def build_stepper(
    worker: WorkerState, task: Task, world: World, plan: Plan, parallel: Parallel, model: nn.Module
) -> Stepper:
    """Return the stepper for the task's kind of loss."""
    kind = GlobalStepper if isinstance(worker.task, GlobalTask) else Stepper
    return kind(worker, task, world, plan, parallel, model)
