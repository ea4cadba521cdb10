"""Distribute a step's microbatches over ranks.

Shares are even, or follow from labels of machines, or from measured speeds.
"""

import os
from collections.abc import Iterator, Mapping

import torch

from steadfast.balance.policy import SpeedPolicy
from steadfast.balance.stopwatch import Stopwatch
from steadfast.data import Fetched
from steadfast.errors import UsageError
from steadfast.plan import Plan, fastest_shares
from steadfast.run.events import Notice
from steadfast.world.control import Rider, gather_objects
from steadfast.world.runtime import Runtime, World, publish_once

LABEL = "STEADFAST_LABEL"  # label of a machine, in the environment of its workers


class Balance(Rider):
    """Balance that leaves the shares unchanged.

    It measures no times, and adds none to the control messages.
    """

    timed = False

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        """Return the batches, and measure the time of each."""
        return batches

    def forwarded(self) -> None:
        """Record that a forward has ended."""


class SpeedBalance(Balance):
    """Balance that adapts the shares to the ranks' speeds.

    All ranks know the same times after the same step, so all ranks decide alike.
    """

    timed = True

    def __init__(self, plan: Plan, num_ahead: int, world: World, runtime: Runtime) -> None:
        self._plan = plan
        self._num_ahead = num_ahead
        self._world = world
        self._runtime = runtime
        self._stopwatch = Stopwatch(runtime.device)
        self._policy = SpeedPolicy(world.size, world.replica_size)
        self._changed_from = 0  # first step with the newest shares

    def batches(self, batches: Iterator[Fetched]) -> Iterator[Fetched]:
        return self._stopwatch.batches(batches)

    def forwarded(self) -> None:
        self._stopwatch.forwarded()

    def payload(self) -> list[float]:
        # The control channel adds up the payloads of all ranks, so each rank fills its own place only.
        payload = [0.0] * self._world.size
        payload[self._world.rank] = self._stopwatch.take_s()
        return payload

    def on_result(self, step: int, payload: list[float]) -> None:
        # Until the new shares are in force, the measurements are those of the old shares. The policy would compare with
        # the old shares, and propose the same change again.
        if step < self._changed_from:
            return
        shares = self._plan.shares_at(step + 1)
        reshare = self._policy.decide(payload, shares)
        if reshare is None:
            return
        # Steps that the loader has read ahead keep the old shares.
        self._changed_from = self._plan.first_unread(step, self._num_ahead)
        self._plan.change(self._changed_from, reshare.shares)
        microbatch_ms = tuple(round(1e3 * seconds, 3) for seconds in reshare.microbatch_s)
        slower = max(reshare.microbatch_s) / min(reshare.microbatch_s)
        reason = "all ranks are equally fast"
        if slower >= 1.05:
            rank = microbatch_ms.index(max(microbatch_ms))
            reason = f"rank {rank} is {slower:.1f}x slower than the fastest rank"
        change = _change(self._changed_from, shares, reshare.shares, reason, microbatch_ms=microbatch_ms)
        publish_once(change, self._runtime, self._world)


def build_balance(
    wanted: str | Mapping[str, float], strategy: str, plan: Plan, num_ahead: int, world: World, runtime: Runtime
) -> Balance:
    """Return the balance of the configuration.

    If workers have weights by label, this function is a collective, and changes `plan`.

    Args:
        wanted: "even", "even_samples", "speed" or weights by label, from `batch.balance`.
        strategy: name of the parallel strategy, for the event that shares must stay even.
        num_ahead: microbatches that the loader fetches ahead.

    Raises:
        UsageError: a worker has no label with a weight.
    """
    even = plan.shares
    if wanted in ("even", "even_samples") or world.size == 1:
        return Balance()
    if world.replicate == 1:
        # A forward is a collective of all ranks, so shares must be even. The event tells the user, but this is no
        # error.
        text = f"shares stay {even} microbatches: under {strategy} every worker runs the same number of microbatches"
        notice = Notice(event="shares", text=text, step=1, before=even, after=even, parallel=strategy)
        publish_once(notice, runtime, world)
        return Balance()
    if isinstance(wanted, str):
        return SpeedBalance(plan, num_ahead, world, runtime)
    labels_by_rank = _labels(world, runtime.device)
    weights = [_weight(rank, labels, wanted) for rank, labels in enumerate(labels_by_rank)]
    # A replica is as fast as its slowest rank.
    of_replicas = [
        min(weights[first : first + world.replica_size]) for first in range(0, world.size, world.replica_size)
    ]
    shares = fastest_shares(of_replicas, sum(even), world.shard_size)
    # No step of this attempt has been read yet, so the change may begin with the first step of the run.
    plan.change(1, shares)
    reason = f"batch.balance gives weights {', '.join(f'{weight:g}' for weight in weights)}"
    publish_once(_change(1, even, shares, reason, weights=tuple(weights)), runtime, world)
    return Balance()


def _change(
    step: int,
    before: tuple[int, ...],
    after: tuple[int, ...],
    reason: str,
    microbatch_ms: tuple[float, ...] | None = None,
    weights: tuple[float, ...] | None = None,
) -> Notice:
    return Notice(
        event="shares",
        text=f"shares {before} -> {after} microbatches from step {step}: {reason}",
        step=step,
        before=before,
        after=after,
        microbatch_ms=microbatch_ms,
        weights=weights,
    )


def _labels(world: World, device: torch.device) -> list[tuple[str, ...]]:
    """Return the labels of every rank.

    STEADFAST_LABEL holds a machine's labels, separated by commas. The last label is the device.
    """
    own = [label for label in os.environ.get(LABEL, "").split(",") if label]
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    own.append(device_name)
    # Only a worker knows the labels of its machine.
    return gather_objects(tuple(own), world.groups.control)


def _weight(rank: int, labels: tuple[str, ...], weights: Mapping[str, float]) -> float:
    # A label must match whole. A device matches by a part of its name, so that A100 matches A100-SXM4.
    for name, weight in weights.items():
        if name in labels or name in labels[-1]:
            return weight
    raise UsageError(
        f"batch.balance: worker {rank} is labelled {', '.join(labels)}, and the weights are for {', '.join(weights)}. "
        "Add a weight for one of its labels, or set STEADFAST_LABEL on its machine"
    )
