"""Measures how long this rank computes on a microbatch, without the time in which it waits for other ranks."""

from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from app.data import Fetched
from app.world.clock import build_clock

_FORWARDS = 3.0  # a backward costs two forwards (Kaplan et al., 2020, table 1), until this rank has timed its own


class _Lapse(NamedTuple):
    """The marks of a microbatch."""

    began: Any
    forwarded: Any
    ended: Any  # None for the last one of a step


class Stopwatch:
    """Takes the time of microbatches, each from the moment in which the step asks for it until it asks for the next."""

    def __init__(self, device: torch.device) -> None:
        self._clock = build_clock(device)
        self._lapses: deque[_Lapse] = deque()
        self._forwarded: Any = None
        self._forwards_in_whole = _FORWARDS

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        """Yield the batches, and mark when each is asked for."""
        began = self._clock.mark()
        former_step = 0
        former_began = None
        for fetched in batches:
            step = fetched.microbatch.step
            if former_step:
                # The last one of a step has no end: its backward waits until all ranks' gradients are added up.
                ended = began if step == former_step else None
                self._lapses.append(_Lapse(former_began, self._forwarded, ended))
            former_step = step
            former_began = began
            yield fetched
            began = self._clock.mark()

    def forwarded(self) -> None:
        """Mark the end of a forward."""
        self._forwarded = self._clock.mark()

    def take_s(self) -> float:
        """Return the median time of the microbatches since the last call in seconds, 0 where there are none."""
        wholes: list[float] = []
        forwards: list[float] = []
        alone: list[float] = []
        # Up to the first that the device is still at: to wait for it would cost more than a later answer.
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
        # With one microbatch a step, none is whole: the time of a forward stands for it, times what it cost before.
        if alone:
            return median(alone) * self._forwards_in_whole
        return 0.0
