"""Optimizer step in which a second rank repeats a microbatch, see `recompute.every`."""

from contextlib import AbstractContextManager

from torch import Tensor, nn

from steadfast.data import Fetched
from steadfast.guards.recompute import Recompute
from steadfast.loop.totals import Totals
from steadfast.loop.worker_state import WorkerState
from steadfast.parallel import Parallel
from steadfast.plan import Plan
from steadfast.step.stepper import Stepper
from steadfast.tasks import Task
from steadfast.world.runtime import World


class RecomputeStepper(Stepper):
    """Stepper that compares a microbatch's gradient with that of another rank.

    A loss over the global batch has no gradient of a microbatch to compare. `check_task` refuses both together.
    """

    def __init__(
        self,
        worker: WorkerState,
        task: Task,
        world: World,
        plan: Plan,
        parallel: Parallel,
        model: nn.Module,
        recompute: Recompute,
    ) -> None:
        super().__init__(worker, task, world, plan, parallel, model)
        self._recompute = recompute
        # It has running statistics of its own, so a repetition does not change those of this step.
        self._apart = Stepper(worker, task, world, plan, parallel, model)

    def _begin(self, step: int) -> AbstractContextManager[object]:
        # The repetition comes first, because it needs gradients of zero, and its forward changes buffers, which
        # `StepBuffers.step` would otherwise count as changed by this step.
        self._recompute.begin(step, self._run_apart)
        return super()._begin(step)

    def _run_microbatch(self, fetched: Fetched, totals: Totals, last: bool) -> tuple[Tensor, Tensor | int]:
        with self._recompute.holding(fetched.microbatch) as held:
            loss_sum, count = super()._run_microbatch(fetched, totals, last=last and not held)
        if held:
            self._recompute.take(loss_sum, count)
            # Leaving the context handles the gradients that are in the buckets.
            with self._parallel.synchronize(self.model, last):
                pass
        return loss_sum, count

    def _run_apart(self, fetched: Fetched) -> tuple[Tensor, Tensor | int]:
        """Run a microbatch of which only the gradient remains.

        The gradient is added to the existing gradients. Returns the sum of the losses, (), and their count.
        """
        with self._buffers_undone():
            return self._apart._run_microbatch(fetched, self._apart._totals, last=False)

    def _wait_for_sums(self) -> None:
        super()._wait_for_sums()
        # Before the sums become gradients: a wrong result must change no weight.
        self._recompute.compare()
