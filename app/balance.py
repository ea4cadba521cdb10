"""How a step's microbatches are shared out: evenly, by what workers are labelled, or by how fast they prove to be."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from app.agree import Rider
from app.config import Config
from app.data import Fetched
from app.errors import UsageError
from app.plan import Plan, Shares, fastest_shares
from app.runtime import Runtime, World
from app.stopwatch import Stopwatch
from app.tasks import Task

LABEL = "STEADFAST_LABEL"  # of a machine, in the environment of its workers

# Equal workers' words differ too. In 50,000 of them, 20 % apart (standard deviation), 11 of 12 never agreed by chance;
# medians of a sliding window agreed hundreds of times, since neighbouring ones share most of their words.
_WORDS, _DISSENTING = 12, 1
_WORTH = 0.05  # of a step's time; a finer gain is not worth another order of sums


class Reshare(NamedTuple):
    """A decision: other shares, and the seconds of a microbatch by rank that they follow from."""

    shares: Shares
    microbatch_s: tuple[float, ...]


class SpeedPolicy:
    """Proposes other shares when nearly every one of the latest words would have gained by them."""

    def __init__(self, num_ranks: int) -> None:
        self._known_s = [0.0] * num_ranks
        self._words: deque[tuple[float, ...]] = deque(maxlen=_WORDS)

    def decide(self, microbatch_s: Sequence[float], shares: Shares) -> Reshare | None:
        """What to do after a word. Once it has proposed something, everything is measured anew.

        Args:
            microbatch_s: by rank, what the word says; 0 from a rank that has nothing new to say.
            shares: those in force.
        """
        self._known_s = [new or old for new, old in zip(microbatch_s, self._known_s, strict=True)]
        if all(self._known_s):
            self._words.append(tuple(self._known_s))
        if len(self._words) < _WORDS:
            return None
        typical_s = tuple(median(rank) for rank in zip(*self._words, strict=True))
        best = fastest_shares([1 / seconds for seconds in typical_s], sum(shares))
        gains = sorted(1 - _step_s(best, word) / _step_s(shares, word) for word in self._words)
        if gains[_DISSENTING] < _WORTH:
            return None
        self._words.clear()
        return Reshare(best, typical_s)


def _step_s(shares: Sequence[int], microbatch_s: Sequence[float]) -> float:
    return max(share * seconds for share, seconds in zip(shares, microbatch_s, strict=True))


class Balance(Rider):
    """Shares that stay as they are: takes no times, and sends none along."""

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        return batches

    def task(self, task: Task) -> Task:
        return task


class SpeedBalance(Balance):
    """Shares that follow the speeds. Every rank hears the same times at the same step, and so plans the same."""

    def __init__(self, plan: Plan, num_ahead: int, world: World, runtime: Runtime) -> None:
        self._plan, self._num_ahead, self._world, self._runtime = plan, num_ahead, world, runtime
        self._stopwatch = Stopwatch(runtime.device)
        self._policy = SpeedPolicy(world.size)
        self._settled = 0  # the step from which on the planned shares are those in force

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        return self._stopwatch.batches(batches)

    def task(self, task: Task) -> Task:
        return self._stopwatch.task(task)

    def say(self) -> list[float]:
        said = [0.0] * self._world.size
        said[self._world.rank] = self._stopwatch.take_s()
        return said

    def hear(self, step: int, said: list[float]) -> None:
        if step < self._settled:
            return
        shares = self._plan.shares_at(step + 1)
        reshare = self._policy.decide(said, shares)
        if reshare is None:
            return
        # The slowest reader is the farthest ahead: its loader has fetched the most steps, and those are settled.
        steps_ahead = math.ceil(self._num_ahead / max(1, min(shares)))
        self._settled = step + 1 + steps_ahead
        self._plan.change(self._settled, reshare.shares)
        microbatch_ms = [round(1e3 * seconds, 3) for seconds in reshare.microbatch_s]
        _tell(self._world, self._runtime, self._settled, shares, reshare.shares, microbatch_ms=microbatch_ms)


def build_balance(config: Config, plan: Plan, num_ahead: int, world: World, runtime: Runtime) -> Balance:
    """A collective where workers are weighted by label; the plan then begins with these shares.

    Args:
        num_ahead: microbatches that the loader fetches ahead.

    Raises:
        UsageError: a worker has no label that has a weight.
    """
    wish, even = config.batch.balance, plan.shares
    if wish == "even" or world.size == 1:
        return Balance()
    if plan.lockstep:
        _tell(world, runtime, 1, even, even, parallel=config.parallel.kind)
        return Balance()
    if wish == "speed":
        return SpeedBalance(plan, num_ahead, world, runtime)
    labels = _labels(world, runtime.device)
    weights = [_weight(rank, each, wish) for rank, each in enumerate(labels)]
    shares = fastest_shares(weights, sum(even))
    plan.change(1, shares)
    _tell(world, runtime, 1, even, shares, weights=weights)
    return Balance()


def _tell(world: World, runtime: Runtime, step: int, before: Shares, after: Shares, **why: Any) -> None:
    if world.leader:
        said = {"attempt": world.attempt, "step": step, "before": before, "after": after}
        runtime.publish({"event": "shares", **said, **why})


def _labels(world: World, device: torch.device) -> list[tuple[str, ...]]:
    """Of every rank: what STEADFAST_LABEL says on its machine, one or more with commas between, and its device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    labels: list[Any] = [None] * world.size
    mine = (*filter(None, os.environ.get(LABEL, "").split(",")), name)
    dist.all_gather_object(labels, mine, group=world.groups.control)
    return labels


def _weight(rank: int, labels: tuple[str, ...], weights: Mapping[str, float]) -> float:
    """A label is matched whole, the device by a part of its name: A100 is an NVIDIA A100-SXM4-80GB."""
    for name, weight in weights.items():
        if name in labels or name in labels[-1]:
            return weight
    raise UsageError(
        f"batch.balance: worker {rank} is labelled {', '.join(labels)}, and the weights are for {', '.join(weights)}. "
        "Add one for it, or set STEADFAST_LABEL on its machine"
    )
