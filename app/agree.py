"""The control word: how all ranks act on the same step without ever waiting for the device.

A small all-reduce of host data on a gloo group of its own. It is posted when a step ends and read when the next one
ends, so it travels while the device works; whatever it says, every rank reads it at the same step. Short steps share a
word: the leader proposes how many, and all ranks follow from the same word on.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from operator import or_
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from app.step import StepResult

_HALF = 1 << 32
_EVERY_S = 0.05  # how old a step may become before its word is posted; one word costs about 0.5 ms of CPU
_WARM_UP = 32  # steps of an attempt, each with a word of its own, before their time is trusted


class Flags(NamedTuple):
    """What one rank wishes; a wish of any rank becomes everybody's."""

    stop: bool = False
    leave: bool = False
    checkpoint: bool = False
    snapshot: bool = False
    validate: bool = False


_HEAD = 1 + len(Flags._fields)  # numbers of a word that are not a step's
_ROW = 6  # and those of each step


@dataclass(frozen=True)
class Agreed:
    """What every rank knows of a step, at the same later step."""

    step: int
    loss: float  # mean over the global batch
    count: int  # what the loss was divided by: tokens or samples
    grad_norm: float  # before clipping
    num_samples: int
    samples_digest: int  # unsigned 64 bit
    finite: bool


class _HostCopy:
    """Numbers of a step on their way from the device; `row()` waits only if the device is not there yet."""

    def __init__(self, result: StepResult) -> None:
        self.result = result
        self._event = torch.cuda.Event() if result.numbers.is_cuda else None
        self._host = result.numbers
        if self._event is not None:
            self._host = torch.empty_like(result.numbers, device="cpu", pin_memory=True)
            self._host.copy_(result.numbers, non_blocking=True)
            self._event.record()

    def row(self) -> tuple[float, ...]:
        """What adds up over ranks. Float64 is exact to 2^53, so the halves of a digest are for 2^21 ranks."""
        if self._event is not None:
            self._event.synchronize()
        loss_sum, count, self.grad_norm = self._host.tolist()
        not_finite = not (math.isfinite(loss_sum) and math.isfinite(self.grad_norm))
        return loss_sum, count, *divmod(self.result.samples_digest, _HALF), self.result.num_samples, not_finite

    def agreed(self, row: list[float]) -> Agreed:
        """The same row once the ranks' have been added up."""
        loss_sum = row[0]
        count, high, low, num_samples, not_finite = map(int, row[1:])
        return Agreed(
            step=self.result.step,
            loss=loss_sum / count if count else math.nan,
            count=count,
            grad_norm=self.grad_norm,
            num_samples=num_samples,
            samples_digest=(high * _HALF + low) % _HALF**2,
            finite=not not_finite,
        )


class _Pace:
    """How many steps a word may cover, from the time between the latest ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._ended = clock, deque([clock()], maxlen=_WARM_UP)

    def tick(self) -> None:
        self._ended.append(self._clock())

    def steps_per_word(self) -> int:
        if len(self._ended) < _WARM_UP:
            return 1
        step_s = median(new - old for old, new in pairwise(self._ended))
        return max(1, min(_WARM_UP, int(_EVERY_S / step_s)))


class Rider:
    """Sends numbers along with every word, added up over ranks. This one has none to send."""

    def say(self) -> list[float]:
        """Of this rank; as many on every rank."""
        return []

    def hear(self, step: int, said: list[float]) -> None:
        """Of all ranks; all of them hear it after the same step."""


class ControlWord:
    """Exchanges the words of one attempt.

    Args:
        group: a gloo group of the whole world, used for nothing else at the same time.
        settle: steps by which a word trails its step, so that its device numbers have arrived: 0 on CPU, 1 on CUDA.
        rider: what else travels in the words.

    `wished` is what the words read so far wish for, by whichever verb, and the page has not granted yet.

    Raises (from every verb): RuntimeError when a peer is gone; that is how the others notice.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        settle: int,
        rider: Rider | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.wished = Flags()
        self._group, self._settle, self._leader = group, settle, group.rank() == 0
        self._rider, self._step = rider or Rider(), 0
        self._pace = _Pace(clock)
        self._num_steps = 1  # in the next word
        self._wishes = Flags()  # of this rank, for the next word
        self._copies: deque[_HostCopy] = deque()
        self._posted: deque[tuple[dist.Work, Tensor, list[_HostCopy]]] = deque()

    @property
    def ending(self) -> bool:
        return self.wished.stop or self.wished.leave

    def granted(self, **which: bool) -> None:
        """Forgets wishes that have been fulfilled: `granted(checkpoint=True)`. On all ranks at the same step."""
        self.wished = self.wished._replace(**dict.fromkeys(which, False))

    def exchange(self, result: StepResult, wishes: Flags) -> list[Agreed]:
        """Takes the numbers of a step; returns those of the steps that all ranks have meanwhile agreed on."""
        self._pace.tick()
        self._step = result.step
        self._copies.append(_HostCopy(result))
        self._wishes = _either(self._wishes, wishes)
        agreed = self._read() if self._posted else []
        if len(self._copies) - self._settle >= self._num_steps:
            self._post(len(self._copies) - self._settle)
        return agreed

    def drain(self) -> list[Agreed]:
        """Every step not agreed on yet, oldest first. A collective: all ranks drain at the same step."""
        if self._copies:
            self._post(len(self._copies))
        return [agreed for _ in range(len(self._posted)) for agreed in self._read()]

    def _post(self, num_steps: int) -> None:
        copies = [self._copies.popleft() for _ in range(num_steps)]
        head = [self._pace.steps_per_word() if self._leader else 0, *self._wishes]
        rows = [number for copy in copies for number in copy.row()]
        self._wishes = Flags()
        word = torch.tensor([*head, *rows, *self._rider.say()], dtype=torch.float64)
        work = self._group.allreduce([word])  # dist.all_reduce adds nothing here but half of the time it takes
        self._posted.append((work, word, copies))

    def _read(self) -> list[Agreed]:
        work, word, copies = self._posted.popleft()
        work.wait()
        numbers = word.tolist()
        self._num_steps, *wishes = map(int, numbers[:_HEAD])
        self.wished = _either(self.wished, Flags(*map(bool, wishes)))
        rows = [numbers[_HEAD + i * _ROW : _HEAD + (i + 1) * _ROW] for i in range(len(copies))]
        self._rider.hear(self._step, numbers[_HEAD + len(copies) * _ROW :])
        return [copy.agreed(row) for copy, row in zip(copies, rows, strict=True)]


def any_rank(condition: bool, group: dist.ProcessGroup) -> bool:
    """Whether it is so on any rank, for when all must go the same way. A collective, of which it waits for the end."""
    said = torch.tensor([condition], dtype=torch.int64)
    dist.all_reduce(said, dist.ReduceOp.MAX, group=group)
    return bool(said)


def _either(one: Flags, other: Flags) -> Flags:
    return Flags(*map(or_, one, other))
