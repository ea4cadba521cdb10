"""Control channel, by which all ranks act on the same step.

No rank waits for the device.

The channel is a small all-reduce of host data on its own gloo group. A message is posted when a step ends and read when
the next one ends, so it travels while the device works, and every rank reads it at the same step. Short steps share a
message: the leader proposes how many, and all ranks follow from the same message on.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from steadfast.plan import Microbatch
from steadfast.run.ledger import NotFinite, StepStats
from steadfast.world.runtime import LEAVE, STOP
from steadfast.world.sums import Plain, Summation

_HALF = 1 << 32
_POST_EVERY_S = 0.05  # largest age of a step before its message is posted; a message costs about 0.5 ms of CPU
_WARM_UP = 32  # first steps of an attempt, which have a message each, until the time of a step is known
_BESIDE = 5  # numbers of a step in a message besides the parts of loss and metrics


class StepResult(NamedTuple):
    """Results of one rank for one step.

    Attributes:
        numbers: (width + 2 + 2 * width * metrics,) float64: the `width` parts of this rank's loss sum, its count, the
            norm of the whole mean gradient, then the parts of sum and count of each metric on this rank. They stay on
            the device until they are needed.
        metric_names: metrics of this rank in this step.
        grad_norms: (parameters,) norm of each parameter's gradient before clipping; a DTensor if sharded.
        losses: each microbatch of this rank, pads excluded, with its () loss sum and its count, which also stay on the
            device.
    """

    step: int
    numbers: Tensor
    num_samples: int  # of this rank, pads excluded
    samples_digest: int  # of this rank, modulo 2^64
    metric_names: tuple[str, ...] = ()
    grad_norms: Tensor | None = None
    lr: float = 0.0  # of the first parameter group
    overflowed: bool = False  # gradients in fp16 overflowed, on all ranks alike, and the step updated nothing
    seconds: float = 0.0  # on the host, which waits for the device at every gate
    data_s: float = 0.0  # part of `seconds`: the wait for batches
    losses: tuple[tuple[Microbatch, Tensor, Tensor | int], ...] = ()
    summation: type[Summation] = Plain  # defines the parts in `numbers`

    @property
    def grad_norm(self) -> Tensor:
        """Return the norm of the whole mean gradient, ()."""
        return self.numbers[self.summation.width + 1]


class _HostCopy:
    """Asynchronous copy of a step's numbers to the host.

    `row()` waits if the copy is not complete.
    """

    def __init__(self, result: StepResult) -> None:
        self.result = result
        # Metrics for which the message has no room: those of this rank at first, and of all ranks after `_add_late`.
        self.late: dict[str, list[float]] = {}  # parts of sum and count, by name
        self._names: Sequence[str] = ()  # of the metrics in the message
        self._width = result.summation.width
        self._host = result.numbers
        self._arrived: torch.cuda.Event | None = None
        if result.numbers.is_cuda:
            # Pinned, because a copy to pageable memory makes the host wait for the device.
            self._host = torch.empty_like(result.numbers, device="cpu", pin_memory=True)
            self._host.copy_(result.numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def __len__(self) -> int:
        return _BESIDE + self._width * (1 + 2 * len(self._names))

    def row(self, names: Sequence[str]) -> list[float]:
        """Return the `len(self)` numbers to add up over ranks, with those of the metrics `names`."""
        self._names = names
        if self._arrived is not None:
            self._arrived.synchronize()
        host: list[float] = self._host.tolist()
        loss = host[: self._width]
        count, self.grad_norm = host[self._width : self._width + 2]
        pairs = host[self._width + 2 :]
        for at, name in enumerate(self.result.metric_names):
            self.late[name] = pairs[2 * self._width * at : 2 * self._width * (at + 1)]
        metrics: list[float] = []
        for name in names:
            metrics += self.late.pop(name, [0.0] * (2 * self._width))
        not_finite = not (math.isfinite(sum(loss)) and (math.isfinite(self.grad_norm) or self.result.overflowed))
        # Float64 is exact up to 2^53, so the halves of a digest can be summed over 2^21 ranks.
        high, low = divmod(self.result.samples_digest, _HALF)
        return [*loss, count, high, low, self.result.num_samples, not_finite, *metrics]

    def stats(self, row: Sequence[float]) -> StepStats:
        """Return the results of a step from the sum of all rows."""
        loss_sum = self.result.summation.join(row[: self._width])
        count, *others = row[self._width : self._width + _BESIDE]
        high, low, num_samples, not_finite = map(int, others)
        metrics = [*row[self._width + _BESIDE :], *chain(*self.late.values())]
        # A step in which everything is masked has no mean, and its loss, even if not finite, is not an error.
        divisor = count or math.nan
        finite = not not_finite or count == 0
        suspects = () if finite else self._suspects()
        # A task may count NaN, which has no integer. The guard refuses such a count with a message.
        if math.isfinite(count):
            count = int(count)
        return StepStats(
            step=self.result.step,
            loss=loss_sum / divisor,
            count=count,
            grad_norm=self.grad_norm,
            num_samples=num_samples,
            samples_digest=(high * _HALF + low) % _HALF**2,
            finite=finite,
            overflowed=self.result.overflowed,
            metrics=means([*self._names, *self.late], metrics, self.result.summation),
            suspects=suspects,
        )

    def _suspects(self) -> tuple[NotFinite, ...]:
        """Return this rank's microbatches with losses that are not finite.

        The host waits for the device.
        """
        found: list[NotFinite] = []
        for microbatch, loss, count in self.result.losses:
            if not bool(loss.isfinite()):
                found.append(NotFinite(microbatch, bool(count == 0)))
        return tuple(found)


class _Pace:
    """Decides how many steps share a message, by their duration."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended = deque([clock()], maxlen=_WARM_UP)

    def tick(self) -> None:
        self._ended.append(self._clock())

    def steps_per_message(self) -> int:
        if len(self._ended) < _WARM_UP:
            return 1
        # The median, because a step followed by a checkpoint or a validation takes many times as long.
        step_s = median(new - old for old, new in pairwise(self._ended))
        return max(1, min(_WARM_UP, int(_POST_EVERY_S / step_s)))


class Rider:
    """Further numbers in every message, summed over ranks; here none."""

    def payload(self) -> list[float]:
        """Return this rank's numbers; their count is the same on all ranks."""
        return []

    def on_result(self, step: int, payload: list[float]) -> None:
        """Receive the sum over all ranks, after the same step everywhere."""


class ControlChannel:
    """Exchanges the messages of one attempt.

    Its methods raise RuntimeError if a peer is gone.

    Args:
        group: a gloo group of the whole world for the channel's exclusive use.
        lag_steps: steps by which a message trails, so that its device numbers have arrived: 0 on CPU, 1 on CUDA.
        names: requests besides "stop" and "leave"; the same on all ranks, in the same order.
        rider: further numbers in the messages.

    Attributes:
        requested: requests of any rank that are not acknowledged yet, equal on all ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        lag_steps: int,
        names: Sequence[str] = (),
        rider: Rider | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.requested: set[str] = set()
        self._group = group
        self._is_leader = group.rank() == 0
        self._lag_steps = lag_steps
        self._names = (STOP, LEAVE, *names)
        self._rider = rider or Rider()
        self._pace = _Pace(clock)
        self._step = 0
        self._num_steps = 1  # covered by the next message
        self._requests: set[str] = set()  # of this rank, for the next message
        self._copies: deque[_HostCopy] = deque()
        # The same on all ranks. A metric with another name is added up in an exchange of its own, see `_add_late`.
        self._metric_names: tuple[str, ...] = ()
        self._posted: deque[tuple[dist.Work, Tensor, list[_HostCopy]]] = deque()

    @property
    def ending(self) -> bool:
        return not self.requested.isdisjoint((STOP, LEAVE))

    def acknowledge(self, name: str) -> None:
        """Remove a request that all ranks have carried out."""
        self.requested.discard(name)

    def exchange(self, result: StepResult, requests: Iterable[str]) -> list[StepStats]:
        """Add a step's numbers, and return the steps finished by all ranks."""
        self._pace.tick()
        self._step = result.step
        self._copies.append(_HostCopy(result))
        self._requests |= set(requests)
        # Read before the next message is posted: the last message has had a whole step to travel.
        finished = self._read() if self._posted else []
        num_ready = len(self._copies) - self._lag_steps
        if num_ready >= self._num_steps:
            self._post(num_ready)
        return finished

    def drain(self) -> list[StepStats]:
        """Return all steps not returned by `exchange`, oldest first. A collective."""
        if self._copies:
            self._post(len(self._copies))
        finished = []
        while self._posted:
            finished += self._read()
        return finished

    def _post(self, num_steps: int) -> None:
        # Messages are summed over ranks, so the other ranks send 0 in the place of the leader's proposal.
        num_steps_proposed = 0
        if self._is_leader:
            num_steps_proposed = self._pace.steps_per_message()
        numbers: list[float] = [num_steps_proposed]
        for name in self._names:
            numbers.append(name in self._requests)
        copies = [self._copies.popleft() for _ in range(num_steps)]
        rows = [copy.row(self._metric_names) for copy in copies]
        numbers += [any(copy.late for copy in copies), *chain(*rows)]
        self._requests.clear()
        message = torch.tensor([*numbers, *self._rider.payload()], dtype=torch.float64)
        # Called on the group, because the checks of dist.all_reduce take as long as this call.
        work = self._group.allreduce([message])
        self._posted.append((work, message, copies))

    def _read(self) -> list[StepStats]:
        work, message, copies = self._posted.popleft()
        work.wait()
        numbers = message.tolist()
        self._num_steps = int(numbers[0])
        for name, num_ranks in zip(self._names, numbers[1:], strict=False):
            if num_ranks:
                self.requested.add(name)
        at = 1 + len(self._names)
        if numbers[at]:
            self._add_late(copies)
        at += 1
        finished = []
        for copy in copies:
            finished.append(copy.stats(numbers[at : at + len(copy)]))
            at += len(copy)
        self._rider.on_result(self._step, numbers[at:])
        return finished

    def _add_late(self, copies: Sequence[_HostCopy]) -> None:
        """Add up the steps' late metrics, for which later messages have room. A blocking collective."""
        by_rank = gather_objects([copy.late for copy in copies], self._group)
        for copy, of_ranks in zip(copies, zip(*by_rank, strict=True), strict=True):
            copy.late = {}
            for name, parts in chain(*map(dict.items, of_ranks)):
                copy.late[name] = list(map(sum, zip(copy.late.get(name, [0.0] * len(parts)), parts, strict=True)))
            self._metric_names = tuple(dict.fromkeys([*self._metric_names, *copy.late]))


def means(names: Sequence[str], parts: Sequence[float], summation: type[Summation]) -> dict[str, float]:
    """Return each metric's mean, none for a count of 0.

    Args:
        parts: the parts of sum and count of each metric in turn.
    """
    width = summation.width
    numbers = [summation.join(parts[at : at + width]) for at in range(0, len(parts), width)]
    found: dict[str, float] = {}
    for name, total, count in zip(names, numbers[::2], numbers[1::2], strict=True):
        if count:
            found[name] = total / count
    return found


def agree_on_names(names: Sequence[str], group: dist.ProcessGroup) -> tuple[str, ...]:
    """Return all ranks' names in one order. A blocking collective."""
    # Ranks add up numbers by position, so a name that only one rank has needs a position on all ranks.
    return tuple(dict.fromkeys(chain.from_iterable(gather_objects(list(names), group))))


def gather_objects(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the objects of all ranks. A blocking collective."""
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, own, group=group)
    return by_rank


def any_rank(condition: bool, group: dist.ProcessGroup) -> bool:
    """Return whether the condition holds on any rank. A blocking collective."""
    answers = torch.tensor([condition], dtype=torch.int64)
    dist.all_reduce(answers, dist.ReduceOp.MAX, group=group)
    return bool(answers)


def gather_numbers(number: int, group: dist.ProcessGroup) -> Tensor:
    """Return the numbers of all ranks, (ranks,) int64. A blocking collective."""
    numbers = torch.empty(dist.get_world_size(), 1, dtype=torch.int64)
    dist.all_gather(list(numbers), torch.tensor([number]), group=group)
    return numbers.squeeze(1)
