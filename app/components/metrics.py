"""Metrics that are made of sums at the very end, such as torchmetrics' F1 or AUROC: a mean of theirs would be wrong."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from app.errors import TrainingError
from app.tasks import Task
from app.world.groups import Groups


class SummedMetrics:
    """The `metrics` of a task, by name: torchmetrics' or others with `metric_state`, `reset` and `compute`.

    The task updates them in its `loss` while the model is in evaluation mode. Raises TrainingError for a state that is
    not added up over processes.
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
                        "sum, so its memory grows with the samples. Curves take thresholds=200, say, to keep sums"
                    )

    @contextmanager
    def counting(self, weight: int) -> Iterator[None]:
        """Undo what a microbatch has changed if it is a pad, whose weight is 0."""
        if weight:
            yield
            return
        before = [state.clone() for state in self._states()]
        yield
        for state, earlier in zip(self._states(), before, strict=True):
            state.copy_(earlier)

    def results(self, groups: Groups) -> dict[str, float]:
        """Return the value of each metric over the samples of all ranks. A collective."""
        results: dict[str, float] = {}
        for state in self._states():
            groups.communicator.sum(state)
        groups.gate()
        for name, metric in self._metrics.items():
            metric._computed = None  # of this rank alone
            metric._update_count = 1  # or it would warn where this rank had pads only
            results |= _by_name(name, metric.compute())
            metric.reset()
        return results

    def _states(self) -> list[Tensor]:
        states: list[Tensor] = []
        for metric in self._metrics.values():
            states += metric.metric_state.values()
        return states


def _by_name(name: str, value: Any) -> dict[str, float]:
    """Return the numbers of a value: one, or one for each key or class."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(part) for key, part in value.items()}
    if value.dim():
        return {f"{name}_{index}": part for index, part in enumerate(value.flatten().tolist())}
    return {name: float(value)}
