"""How a step's microbatches are shared out: evenly, by what workers are labelled, or by how fast they prove to be."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from app.balance.policy import SpeedPolicy
from app.balance.stopwatch import Stopwatch
from app.data import Fetched
from app.errors import UsageError
from app.plan import Plan, fastest_shares
from app.run import events
from app.world.control import Rider
from app.world.runtime import Runtime, World, publish_once

LABEL = "STEADFAST_LABEL"  # of a machine, in the environment of its workers


class Balance(Rider):
    """Leaves the shares as they are. It takes no times, and adds none to the messages."""

    timed = False

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        """Return the batches, taking the time of each on the way."""
        return batches

    def forwarded(self) -> None:
        """Take note that a forward has ended."""


class SpeedBalance(Balance):
    """Adapts the shares to the ranks' speeds, on every rank alike: all know the same times after the same step."""

    timed = True

    def __init__(self, plan: Plan, num_ahead: int, world: World, runtime: Runtime) -> None:
        self._plan = plan
        self._num_ahead = num_ahead
        self._world = world
        self._runtime = runtime
        self._stopwatch = Stopwatch(runtime.device)
        self._policy = SpeedPolicy(world.size, world.shard)
        self._changed_from = 0  # the step from which on the planned shares are those in force

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        return self._stopwatch.batches(batches)

    def forwarded(self) -> None:
        self._stopwatch.forwarded()

    def payload(self) -> list[float]:
        payload = [0.0] * self._world.size
        payload[self._world.rank] = self._stopwatch.take_s()
        return payload

    def on_result(self, step: int, payload: list[float]) -> None:
        # Until the other shares are in force, what is measured is of those before.
        if step < self._changed_from:
            return
        shares = self._plan.shares_at(step + 1)
        reshare = self._policy.decide(payload, shares)
        if reshare is None:
            return
        # Steps that the loader has read ahead keep their shares.
        self._changed_from = self._plan.first_unread(step, self._num_ahead)
        self._plan.change(self._changed_from, reshare.shares)
        microbatch_ms = tuple(round(1e3 * seconds, 3) for seconds in reshare.microbatch_s)
        change = events.Shares(
            step=self._changed_from, before=shares, after=reshare.shares, microbatch_ms=microbatch_ms
        )
        publish_once(change, self._runtime, self._world)


def build_balance(
    wanted: str | Mapping[str, float], strategy: str, plan: Plan, num_ahead: int, world: World, runtime: Runtime
) -> Balance:
    """Return what shares the microbatches out. Where workers are weighted by label, a collective that changes `plan`.

    Args:
        wanted: "even", "speed" or weights by label, as `batch.balance` says.
        strategy: name of the parallelism, for the message that shares must stay even.
        num_ahead: microbatches that the loader fetches ahead.

    Raises:
        UsageError: a worker has no label that has a weight.
    """
    even = plan.shares
    if wanted == "even" or world.size == 1:
        return Balance()
    if world.replicate == 1:
        # A forward is a collective of all ranks. That other shares were wished for in vain is said, not an error.
        publish_once(events.Shares(step=1, before=even, after=even, parallel=strategy), runtime, world)
        return Balance()
    if isinstance(wanted, str):
        return SpeedBalance(plan, num_ahead, world, runtime)
    labels_by_rank = _labels(world, runtime.device)
    weights = [_weight(rank, labels, wanted) for rank, labels in enumerate(labels_by_rank)]
    of_replicas = [min(weights[first : first + world.shard]) for first in range(0, world.size, world.shard)]
    shares = fastest_shares(of_replicas, sum(even), world.shard)
    plan.change(1, shares)
    publish_once(events.Shares(step=1, before=even, after=shares, weights=tuple(weights)), runtime, world)
    return Balance()


def _labels(world: World, device: torch.device) -> list[tuple[str, ...]]:
    """Return the labels of every rank: what STEADFAST_LABEL says on its machine, by commas, and last its device."""
    own = [label for label in os.environ.get(LABEL, "").split(",") if label]
    own.append(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    labels: list[Any] = [None] * world.size
    dist.all_gather_object(labels, tuple(own), group=world.groups.control)
    return labels


def _weight(rank: int, labels: tuple[str, ...], weights: Mapping[str, float]) -> float:
    # A label matches whole, the device by a part of its name: A100 is an A100-SXM4.
    for name, weight in weights.items():
        if name in labels or name in labels[-1]:
            return weight
    raise UsageError(
        f"batch.balance: worker {rank} is labelled {', '.join(labels)}, and the weights are for {', '.join(weights)}. "
        "Add one for it, or set STEADFAST_LABEL on its machine"
    )
