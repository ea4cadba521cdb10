"""How long this rank computes on a microbatch, the waiting for other ranks left out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from app.data import Fetched
from app.tasks import Sums, Task

_FORWARDS = 3.0  # a backward costs two forwards (Kaplan et al., 2020, table 1), until this rank has timed its own


class Stopwatch:
    """Put around the batches and the task that a step is given.

    A microbatch lasts from the moment in which the step asks for it to that in which it asks for the next one. So the
    last one of a step has no end, and must not have one: its backward waits until all ranks' gradients are added up.
    A rank with one microbatch a step multiplies the time of its forward by what a whole one has cost before.

    On CUDA the marks are events in the stream, read when the device has passed them: nothing waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = _DeviceClock() if device.type == "cuda" else _HostClock()
        self._lapses: deque[_Lapse] = deque()
        self._forwarded: Any = None
        self._forwards_in_whole = _FORWARDS

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        began, former, former_began = self._clock.mark(), 0, None
        for fetched in batches:
            step = fetched.microbatch.step
            if former:
                self._lapses.append(_Lapse(former_began, self._forwarded, began if step == former else None))
            former, former_began = step, began
            yield fetched
            began = self._clock.mark()

    def task(self, task: Task) -> Task:
        return _TimedTask(task, self)

    def forwarded(self) -> None:
        self._forwarded = self._clock.mark()

    def take_s(self) -> float:
        """The median of the microbatches since the last call, 0 where there are none."""
        wholes, forwards, alone = [], [], []
        while self._lapses and self._clock.passed(self._lapses[0].ended or self._lapses[0].forwarded):
            began, forwarded, ended = self._lapses.popleft()
            if ended is None:
                alone.append(self._clock.between_s(began, forwarded))
            else:
                wholes.append(self._clock.between_s(began, ended))
                forwards.append(self._clock.between_s(began, forwarded))
        if wholes:
            self._forwards_in_whole = median(wholes) / max(median(forwards), 1e-9)
            return median(wholes)
        return median(alone) * self._forwards_in_whole if alone else 0.0


class _Lapse(NamedTuple):
    """The marks of a microbatch; `ended` is None for the last one of a step."""

    began: Any
    forwarded: Any
    ended: Any


class _TimedTask:
    def __init__(self, task: Task, stopwatch: Stopwatch) -> None:
        self._task, self._stopwatch = task, stopwatch

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums = self._task.loss(model, batch)
        self._stopwatch.forwarded()
        return sums


class _HostClock:
    def mark(self) -> Any:
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        return True

    def between_s(self, first: Any, second: Any) -> float:
        return float(second - first)


class _DeviceClock(_HostClock):
    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def between_s(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second)) / 1e3
