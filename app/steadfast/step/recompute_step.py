"""Optimizer step in which a second rank repeats a microbatch, see `recompute.every`."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from torch import Tensor

from steadfast.data import Fetched
from steadfast.guards.recompute import Recompute
from steadfast.loop.totals import Totals
from steadfast.step.stepper import Stepper


@dataclass
class RecomputeStepper(Stepper):
    """Stepper that compares a microbatch's gradient with that of another rank."""

    recompute: Recompute = field(default_factory=Recompute)

    # A loss over the global batch has no gradient of a microbatch to compare. `check_task` refuses both together, so a
    # `GlobalStepper` never needs this class.
    @classmethod
    def around(cls, stepper: Stepper, recompute: Recompute) -> Self:
        """Return a stepper that also carries out the checks of `recompute`."""
        values: dict[str, Any] = {}
        for each in fields(stepper):
            values[each.name] = getattr(stepper, each.name)
        return cls(**values, recompute=recompute)

    def _begin(self, step: int) -> None:
        # The repetition comes first, because it needs gradients of zero, and its forward changes buffers, which
        # `Buffers.begin` would otherwise count as changed by this step.
        self.recompute.begin(step, self._run_apart)
        super()._begin(step)

    def _run_microbatch(self, fetched: Fetched, totals: Totals, last: bool) -> tuple[Tensor, Tensor | int]:
        with self.recompute.holding(fetched.microbatch) as held:
            loss_sum, count = super()._run_microbatch(fetched, totals, last=last and not held)
        if held:
            self.recompute.take(loss_sum, count)
            # Leaving the context handles the gradients that are in the buckets.
            with self.parallel.synchronize(self.model, last):
                pass
        return loss_sum, count

    def _run_apart(self, fetched: Fetched) -> tuple[Tensor, Tensor | int]:
        """Run a microbatch of which only the gradient remains.

        The gradient is added to the existing gradients. Returns the sum of the losses, (), and their count.
        """
        # A copied stepper has running statistics of its own, so those of this step do not change.
        apart = replace(self, recompute=Recompute())
        with self._buffers.undone():
            return apart._run_microbatch(fetched, Totals(self.precision.device, self._summation), last=False)

    def _wait_for_sums(self) -> None:
        super()._wait_for_sums()
        # Before the sums become gradients: a wrong result must change no weight.
        self.recompute.compare()
