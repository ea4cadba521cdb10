"""What a task's sums add up to over the microbatches of one rank."""

from collections.abc import Iterable

import torch
from torch import Tensor

from app.tasks import Mean, Sums


class Totals:
    """Loss, count and metrics of the microbatches that one rank has run."""

    # On the device: to read a loss after each microbatch would make the host wait where it should run ahead.
    def __init__(self, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self._metrics: dict[str, tuple[Tensor, Tensor]] = {}  # sum and count of each, () float64

    @property
    def metric_names(self) -> list[str]:
        return sorted(self._metrics)

    def add(self, sums: Sums, weight: int) -> None:
        """Add a microbatch, or nothing for a pad, whose weight is 0."""
        self.loss_sum += sums.loss_sum.detach() * weight
        self.count += sums.count * weight
        for name, metric in sums.metrics.items():
            mean = metric if isinstance(metric, Mean) else Mean(metric, sums.count)
            total, count = self._metrics.get(name, (torch.zeros_like(self.count), torch.zeros_like(self.count)))
            self._metrics[name] = total + _number(mean.total) * weight, count + _number(mean.count) * weight

    def metrics(self, names: Iterable[str]) -> list[Tensor]:
        """Return sum and count of each of these metrics, one after the other; zeros for one that is not there."""
        none = torch.zeros_like(self.count)
        numbers: list[Tensor] = []
        for name in names:
            numbers += self._metrics.get(name, (none, none))
        return numbers


def _number(value: Tensor | float) -> Tensor | float:
    return value.detach().double() if isinstance(value, Tensor) else value
