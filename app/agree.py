"""The control word: how all ranks act on the same step without ever waiting for the device.

One small all-reduce a step, of host data, on a gloo group of its own. It is posted when a step ends and read when the
next one ends, so it travels while the device works; whatever it says, every rank reads it at the same step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from app.step import StepResult

_HALF = 1 << 32


class Flags(NamedTuple):
    """What one rank wishes; a wish of any rank becomes everybody's."""

    stop: bool = False
    leave: bool = False
    checkpoint: bool = False
    validate: bool = False


@dataclass(frozen=True)
class Agreed:
    """What every rank knows of a step, at the same later step."""

    step: int
    loss: float  # mean over the global batch
    count: int  # what the loss was divided by: tokens or samples
    grad_norm: float  # before clipping
    num_samples: int
    samples_digest: int  # unsigned 64 bit
    flags: Flags
    finite: bool


class _HostCopy:
    """Numbers of a step on their way from the device; `numbers()` waits only if the device is not there yet."""

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self._event = torch.cuda.Event() if result.numbers.is_cuda else None
        self._host = torch.empty_like(result.numbers, device="cpu", pin_memory=self._event is not None)
        self._host.copy_(result.numbers, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def numbers(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


class ControlWord:
    """Exchanges the words of one attempt.

    Args:
        group: a gloo group of the whole world, used for nothing else at the same time.
        settle: steps by which a word trails its step, so that its device numbers have arrived: 0 on CPU, 1 on CUDA.

    stop and leave are true from the moment that a word which said so has been read, by whichever verb.

    Raises (from every verb): RuntimeError when a peer is gone; that is how the others notice.
    """

    def __init__(self, group: dist.ProcessGroup, settle: int) -> None:
        self.stop = self.leave = False
        self._group, self._settle = group, settle
        self._copies: deque[_HostCopy] = deque()
        self._posted: deque[tuple[dist.Work, Tensor, int, float]] = deque()

    def exchange(self, result: StepResult, flags: Flags) -> Agreed | None:
        """Posts the word of this step and returns the newest one that all ranks have, if there is one yet."""
        self._copies.append(_HostCopy(result))
        agreed = self._read() if self._posted else None
        if len(self._copies) > self._settle:
            self._post(self._copies.popleft(), flags)
        return agreed

    def drain(self) -> list[Agreed]:
        """Every word still under way, oldest first. A collective: all ranks drain at the same step."""
        while self._copies:
            self._post(self._copies.popleft(), Flags())
        return [self._read() for _ in range(len(self._posted))]

    def _post(self, copy: _HostCopy, flags: Flags) -> None:
        loss_sum, count, grad_norm = copy.numbers()
        result, not_finite = copy.result, not (math.isfinite(loss_sum) and math.isfinite(grad_norm))
        # float64 holds whole numbers up to 2^53, so the digest's halves add up exactly for 2^21 ranks.
        halves = divmod(result.samples_digest, _HALF)
        word = torch.tensor([loss_sum, count, *halves, result.num_samples, not_finite, *flags], dtype=torch.float64)
        work = self._group.allreduce([word])  # dist.all_reduce adds nothing here but half of the time it takes
        self._posted.append((work, word, result.step, grad_norm))

    def _read(self) -> Agreed:
        work, word, step, grad_norm = self._posted.popleft()
        work.wait()
        loss_sum, *numbers = word.tolist()
        count, high, low, num_samples, not_finite, *wishes = map(int, numbers)
        flags = Flags(*map(bool, wishes))
        self.stop |= flags.stop
        self.leave |= flags.leave
        return Agreed(
            step=step,
            loss=loss_sum / count if count else math.nan,
            count=count,
            grad_norm=grad_norm,
            num_samples=num_samples,
            samples_digest=(high * _HALF + low) % _HALF**2,
            flags=flags,
            finite=not not_finite,
        )
