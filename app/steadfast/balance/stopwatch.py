"""Measure this rank's computing time per microbatch.

The time in which the rank waits for other ranks is left out.
"""

from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch

from steadfast.data import Fetched
from steadfast.world.clock import build_clock

# a backward costs as much as two forwards (Kaplan et al., 2020, table 1); used until this rank has measured its own
_FORWARDS = 3.0


class _Lapse(NamedTuple):
    """Time marks of a microbatch."""

    began: Any
    forwarded: Any
    ended: Any  # None for the last microbatch of a step


class Stopwatch:
    """Timer of microbatches.

    The time of a microbatch begins when the step requests it, and ends at the request for the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = build_clock(device)
        self._lapses: deque[_Lapse] = deque()
        self._forwarded: Any = None
        self._forwards_in_whole = _FORWARDS

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        """Yield the batches, and mark the time of each request."""
        began = self._clock.mark()
        former_step = 0
        former_began = None
        for fetched in batches:
            step = fetched.microbatch.step
            if former_step:
                # The last microbatch of a step has no end, because its backward waits for the gradients of all ranks.
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
        """Return the median seconds of the microbatches since the last call.

        Returns 0 if there are none.
        """
        wholes: list[float] = []
        forwards: list[float] = []
        alone: list[float] = []
        # The loop ends at the first microbatch that the device still computes, because waiting for it would cost more
        # than a later answer.
        while self._lapses and self._clock.passed(self._lapses[0].ended or self._lapses[0].forwarded):
            began, forwarded, ended = self._lapses.popleft()
            if ended is None:
                alone.append(self._clock.between_s(began, forwarded))
            else:
                wholes.append(self._clock.between_s(began, ended))
                forwards.append(self._clock.between_s(began, forwarded))
        if wholes:
            # A clock may be too coarse to measure a short forward.
            self._forwards_in_whole = median(wholes) / max(median(forwards), 1e-9)
            return median(wholes)
        # With one microbatch per step none is whole. The time of its forward is then scaled by the last known ratio.
        if alone:
            return median(alone) * self._forwards_in_whole
        return 0.0
