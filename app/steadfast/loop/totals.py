"""Sums of a task's results over the microbatches of one rank."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from steadfast.tasks import Mean, Sums
from steadfast.world.sums import OrderFree, Plain, Summation


class Totals:
    """Sums of the losses, loss counts and metrics of one rank's microbatches."""

    summation: ClassVar[type[Summation]] = Plain

    # The sums stay on the device: reading a loss after each microbatch would make the host wait for it.
    def __init__(self, device: torch.device) -> None:
        self._none = torch.zeros(self.summation.width, dtype=torch.float64, device=device)
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self.begin()

    def begin(self) -> None:
        """Begin a new sum; the tensors of the last one keep their values."""
        self.loss_sum = self._none  # (width,)
        self.count = self._zero
        self._metrics: dict[str, tuple[Tensor, Tensor]] = {}  # name -> sum and count, (width,) each

    @property
    def metric_names(self) -> list[str]:
        return sorted(self._metrics)

    def add(self, sums: Sums, weight: int) -> None:
        """Add the sums of a microbatch; a pad adds nothing."""
        self.loss_sum = self.loss_sum + self.parts(sums.loss_sum.detach()) * weight
        self.count = self.count + sums.count * weight
        for name, metric in sums.metrics.items():
            mean = metric
            if not isinstance(mean, Mean):
                mean = Mean(mean, sums.count)
            total, count = self._metrics.get(name, (self._none, self._none))
            self._metrics[name] = total + self._added(mean.total) * weight, count + self._added(mean.count) * weight

    def parts(self, number: Tensor) -> Tensor:
        """Return a number as the sums hold it, () -> (width,) float64."""
        return number.double().reshape(1)

    def _added(self, value: Tensor | float) -> Tensor:
        if isinstance(value, Tensor):
            return self.parts(value.detach())
        # new_full makes a float64 number on the device without a copy from the host.
        return self.parts(self._none.new_full((), value))

    def metrics(self, names: Iterable[str]) -> list[Tensor]:
        """Return sum and count of each named metric, zeros if unknown."""
        numbers: list[Tensor] = []
        for name in names:
            numbers += self._metrics.get(name, (self._none, self._none))
        return numbers


class ExactTotals(Totals):
    """Totals of an exact run, the same in every order."""

    summation = OrderFree

    def parts(self, number: Tensor) -> Tensor:
        return OrderFree.split(number)


def totals_of(exact: bool) -> type[Totals]:
    """Return the totals of an exact or an ordinary run."""
    return ExactTotals if exact else Totals
