"""Metrics such as F1, computed from sums over all ranks.

The mean of such a metric over ranks or batches would be wrong.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from steadfast.errors import TrainingError
from steadfast.tasks import Task
from steadfast.world.groups import Groups


class SummedMetrics:
    """Metrics of a task by name, with the interface of torchmetrics.

    The interface is `metric_state`, `reset` and `compute`.

    The task updates its metrics in `loss` while the model is in evaluation mode. Raises TrainingError for a metric
    whose state is not summed over processes.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._metrics: dict[str, Any] = dict(getattr(task, "metrics", {}).items())
        for name, metric in self._metrics.items():
            metric.to(device)
            metric.reset()
            for state, reduction in metric._reductions.items():
                if getattr(reduction, "__name__", "") != "dim_zero_sum":
                    raise TrainingError(
                        f"the task's metric {name}, a {type(metric).__name__}, keeps a state ({state}) that is not a "
                        "sum, so its memory grows with the samples. For curves, thresholds=200 keeps sums instead"
                    )

    @contextmanager
    def counting(self, weight: int) -> Iterator[None]:
        """Undo changes that a pad, of weight 0, makes to the metrics."""
        if weight:
            yield
            return
        before = list(map(torch.clone, self._states()))
        yield
        for state, earlier in zip(self._states(), before, strict=True):
            state.copy_(earlier)

    def results(self, groups: Groups) -> dict[str, float]:
        """Return each metric over the samples of all ranks. A collective."""
        results: dict[str, float] = {}
        for state in self._states():
            groups.communicator.sum(state)
        groups.gate()
        for name, metric in self._metrics.items():
            # The cached value is that of this rank alone.
            metric._computed = None
            # A rank that had only pads would otherwise warn that its metric was never updated.
            metric._update_count = 1
            results |= _by_name(name, metric.compute())
            metric.reset()
        return results

    def _states(self) -> list[Tensor]:
        states: list[Tensor] = []
        for metric in self._metrics.values():
            states += metric.metric_state.values()
        return states


def _by_name(name: str, value: Any) -> dict[str, float]:
    """Return a value as named numbers, one for each key or class."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(part) for key, part in value.items()}
    if value.dim():
        return {f"{name}_{index}": part for index, part in enumerate(value.flatten().tolist())}
    return {name: float(value)}
