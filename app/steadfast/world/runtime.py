"""Interface of a worker to its launcher.

The interface provides worlds to train in, signals, and publication of events. `orchestration` implements it for Ray,
`launch/torchrun.py` for torchrun.
"""

import socket
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import torch
import torch.distributed as dist

from steadfast.plan import Amendments
from steadfast.run.events import Event
from steadfast.world.clock import build_clock
from steadfast.world.groups import Groups, WorldRank
from steadfast.world.progress import Progress
from steadfast.world.timeouts import Timeouts

Axis = Literal["replicate", "stage", "shard", "tensor"]

# Requests that any rank may make of all ranks, see `Signals`.
STOP = "stop"
LEAVE = "leave"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class World:
    """Workers of one attempt, and this worker's place among the ranks.

    The ranks are arranged on four axes, replicate x stage x shard x tensor; the last one varies fastest. `replica_size`
    neighbouring ranks together hold one model and form a replica. The stages of a replica compute the same samples one
    after another, and ranks that differ on the tensor axis alone compute parts of the same layers for the same samples.
    Ranks that differ in replica or shard compute different samples.
    """

    rank: int
    size: int
    attempt: int
    groups: Groups
    amendments: Amendments = field(default_factory=Amendments)
    progress: Progress = field(default_factory=Progress)  # belongs to the process, and remembers earlier attempts
    node: str = field(default_factory=socket.gethostname)  # machine, whose loss includes this worker
    replica_size: int = 1
    stages: int = 1
    tensor_size: int = 1

    @property
    def replicate(self) -> int:
        return self.size // self.replica_size

    @property
    def shard_size(self) -> int:
        return self.replica_size // (self.stages * self.tensor_size)

    @property
    def stage(self) -> int:
        return self.part // (self.shard_size * self.tensor_size)

    @property
    def shard(self) -> int:
        return self.part // self.tensor_size % self.shard_size

    @property
    def tensor(self) -> int:
        return self.rank % self.tensor_size

    @property
    def data_size(self) -> int:
        """Return the number of places on the data axes, replicate and shard."""
        return self.size // (self.stages * self.tensor_size)

    @property
    def data_rank(self) -> int:
        """Return this rank's place on the data axes, which decides on its samples."""
        return self.rank // self.replica_size * self.shard_size + self.shard

    @property
    def in_last_stage(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def counts(self) -> bool:
        """Return whether this rank's losses and samples are counted, as one of those that compute the same ones."""
        return self.in_last_stage and self.tensor == 0

    def lines(self, axis: Axis) -> list[list[int]]:
        """Return the ranks that differ in their place on one axis only, for all places on the other axes."""
        sizes = {
            "replicate": self.replicate,
            "stage": self.stages,
            "shard": self.shard_size,
            "tensor": self.tensor_size,
        }
        ranks = torch.arange(self.size).view(*sizes.values())
        lines: list[list[int]] = ranks.movedim(list(sizes).index(axis), -1).flatten(0, 2).tolist()
        return lines

    @property
    def part(self) -> int:
        """Return this rank's part of the model, of `replica_size` parts."""
        return self.rank % self.replica_size

    @property
    def box(self) -> tuple[int, ...]:
        """Return the part, and how a replica divides the model: ranks with equal boxes hold the same parameters."""
        return self.part, self.stages, self.shard_size, self.tensor_size

    @property
    def in_first_replica(self) -> bool:
        return self.rank < self.replica_size

    @property
    def leader(self) -> bool:
        """Return whether this rank writes ledger, manifests, trackers and summary."""
        return self.rank == 0


@dataclass(frozen=True)
class Signals:
    """Requests to the run from outside, effective once all ranks agree."""

    stop: bool = False  # end the run at the next agreed step, resumable
    leave: bool = False  # end this attempt at the next agreed step; another world follows
    checkpoint: bool = False  # write a checkpoint, because no worker with the state will be in the next world


@dataclass(frozen=True)
class Outcome:
    """End of an attempt for a worker; after "resized" another world follows."""

    kind: Literal["finished", "stopped", "resized"]
    step: int

    @classmethod
    def of(cls, step: int, at_end: bool, requested: Collection[str]) -> Self:
        """Return the end of an attempt after `step`, from the end of the run and the agreed requests."""
        if at_end:
            return cls("finished", step)
        # A run that is to stop needs no other world, even if a worker has to leave as well.
        if LEAVE in requested and STOP not in requested:
            return cls("resized", step)
        return cls("stopped", step)

    def needs_checkpoint(self, survivors_hold_all: bool, requested: Collection[str]) -> bool:
        """Return whether the state must be written, for lack of survivors."""
        carried = self.kind == "resized" and survivors_hold_all and CHECKPOINT not in requested
        return self.step > 0 and not carried


class Runtime(Protocol):
    """Services that a worker needs from its launcher."""

    device: torch.device

    def next_world(self) -> World | None:
        """Return the next formed world, or None if this worker may end."""

    def signals(self) -> Signals:
        """Return the current requests to the run."""

    def publish(self, event: Event) -> None:
        """Record and show an event."""

    def failed(self, step: int, error: BaseException) -> bool:
        """Record why an attempt failed after `step`; return whether this worker continues.

        Raises `error` if it ends the run.
        """


def publish_once(event: Event, runtime: Runtime, world: World) -> None:
    """Publish an event that all ranks know, on the leader only."""
    if world.leader:
        runtime.publish(event.of_attempt(world.attempt))


@dataclass(frozen=True)
class WorkerProcess:
    """Properties of a worker process that are the same in every attempt."""

    device: torch.device
    timeouts: Timeouts = field(default_factory=Timeouts)
    progress: Progress = field(default_factory=Progress)
    node: str = field(default_factory=socket.gethostname)


def form_world(
    store: dist.Store,
    own: WorldRank,
    process: WorkerProcess,
    amendments: Amendments | None = None,
    aborted: threading.Event | None = None,
) -> World:
    """Form the process groups of an attempt over `store`. A collective.

    Args:
        aborted: as in `Groups.form`.

    Raises:
        PeerLost: a member did not come, or died while the groups formed.
    """
    groups = Groups.form(store, own, process.device, process.timeouts, aborted)
    process.progress.begin(own.attempt, own.rank, build_clock(process.device))
    return World(*own, groups, amendments or Amendments(), process.progress, process.node)
