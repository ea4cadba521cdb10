"""What a worker asks of whoever started it: a world to train in, signals, and somewhere to publish events.

The implementation for Ray is in app/orchestration/, that for torchrun in app/launch/torchrun.py.
"""

import socket
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import torch
import torch.distributed as dist

from app.plan import Amendments
from app.run.events import Event
from app.world.clock import build_clock
from app.world.groups import Groups
from app.world.progress import Progress
from app.world.timeouts import Timeouts

_DEFAULT = Timeouts()

# What any rank may request of all of them, see `Signals`.
STOP = "stop"
LEAVE = "leave"
CHECKPOINT = "checkpoint"
FINISH = "finish"


@dataclass(frozen=True)
class World:
    """The set of workers of one attempt, and this worker's place in it.

    The ranks stand on two axes: `shard` neighbouring ranks hold one model among them and are a replica, and there are
    `replicate` replicas.
    """

    rank: int
    size: int
    attempt: int
    groups: Groups
    amendments: Amendments = field(default_factory=Amendments)
    progress: Progress = field(default_factory=Progress)  # the process's own, which remembers earlier attempts
    node: str = field(default_factory=socket.gethostname)  # the machine, with which this worker may be lost
    shard: int = 1

    @property
    def replicate(self) -> int:
        return self.size // self.shard

    @property
    def part(self) -> int:
        """Return which part of its replica's model this rank holds, of `shard` parts."""
        return self.rank % self.shard

    @property
    def in_first_replica(self) -> bool:
        return self.rank < self.shard

    @property
    def leader(self) -> bool:
        """Return whether this rank writes ledger, manifests, trackers and summary."""
        return self.rank == 0


@dataclass(frozen=True)
class Signals:
    """What is requested of the run from outside. Nothing happens before all ranks have agreed on it."""

    stop: bool = False  # end the run at the next agreed step, resumable
    leave: bool = False  # end this attempt at the next agreed step; another world follows
    finish: bool = False  # end the run at the next agreed step as if it were its last
    checkpoint: bool = False  # write one, since nobody who holds the state will be in the next world


@dataclass(frozen=True)
class Outcome:
    """How a worker reached the end of an attempt. `resized` means that another world follows."""

    kind: Literal["finished", "stopped", "resized"]
    step: int

    @classmethod
    def of(cls, step: int, num_steps: int, requested: Collection[str]) -> Self:
        """Return how an attempt ends after `step` of a run of `num_steps`, with what all ranks know is requested."""
        if step == num_steps or FINISH in requested:
            return cls("finished", step)
        # Whoever wants the run to stop wants no other world for it, even if a worker has to leave as well.
        if LEAVE in requested and STOP not in requested:
            return cls("resized", step)
        return cls("stopped", step)

    def needs_checkpoint(self, survivors_hold_all: bool, requested: Collection[str]) -> bool:
        """Return whether the state must be written down, because no survivor will carry all of it to another world."""
        carried = self.kind == "resized" and survivors_hold_all and CHECKPOINT not in requested
        return self.step > 0 and not carried


class Runtime(Protocol):
    """How a worker is orchestrated."""

    device: torch.device

    def next_world(self) -> World | None:
        """Return the next world once it has formed; None when this worker is not needed any more."""

    def signals(self) -> Signals:
        """Return what is requested of the run now."""

    def publish(self, event: Event) -> None:
        """Record an event and show it."""

    def failed(self, step: int, error: BaseException) -> bool:
        """Record why an attempt broke after `step`. Return whether this worker trains on.

        Raises `error` if the run may not go on because of it.
        """


def publish_once(event: Event, runtime: Runtime, world: World) -> None:
    """Publish an event of this attempt that every rank knows of: the leader does it for all."""
    if world.leader:
        runtime.publish(event.of_attempt(world.attempt))


def form_world(
    store: dist.Store,
    rank: int,
    size: int,
    attempt: int,
    device: torch.device,
    amendments: Amendments | None = None,
    timeouts: Timeouts = _DEFAULT,
    progress: Progress | None = None,
    node: str | None = None,
    aborted: threading.Event | None = None,
) -> World:
    """Form the process groups of an attempt over `store`. A collective.

    Args:
        aborted: as in `Groups.form`.

    Raises:
        PeerLost: a member did not come, or died while the groups formed.
    """
    groups = Groups.form(store, rank, size, attempt, device, timeouts, aborted)
    place = rank, size, attempt, groups
    world = World(*place, amendments or Amendments(), progress or Progress(), node or socket.gethostname())
    world.progress.begin(attempt, rank, build_clock(device))
    return world
