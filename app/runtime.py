"""What a worker asks of whoever started it: a world to train in, signals, and somewhere to publish.

`Runtime` owns the process groups: a generation of them is formed over a TCPStore under a prefix of its own, lives for
one attempt and is destroyed with it (app/groups.py), so one process can be part of many worlds. Ray's implementation
is in app/orchestration/, torchrun's in app/torchrun.py.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from app.faults.watchdog import Progress
from app.groups import Groups
from app.timeouts import Timeouts

_DEFAULT = Timeouts()
Event = dict[str, Any]


@dataclass(frozen=True)
class World:
    """The set of workers of one attempt, and this worker's place in it.

    skip: steps that are left out, because their numbers were bad.
    progress: how far this worker is; it is the process's own, and knows of earlier attempts.
    node: the machine that this worker shares with others, and with which it may be lost.
    """

    rank: int
    size: int
    attempt: int
    groups: Groups
    skip: frozenset[int] = frozenset()
    progress: Progress = field(default_factory=Progress)
    node: str = field(default_factory=socket.gethostname)

    @property
    def leader(self) -> bool:
        """The rank that writes: ledger, manifests, trackers, summary."""
        return self.rank == 0


@dataclass(frozen=True)
class Signals:
    """What is wished of the run from outside; nothing happens before all ranks agreed on it."""

    stop: bool = False  # end the run at the next agreed step, resumable
    leave: bool = False  # end this attempt at the next agreed step; another world follows
    checkpoint: bool = False  # write one: none of those who hold the state may be in the next world


@dataclass(frozen=True)
class Outcome:
    """How a worker reached the end of an attempt. `resized` means that another world follows."""

    kind: Literal["finished", "stopped", "resized"]
    step: int


class Runtime(Protocol):
    """How a worker is orchestrated.

    Verbs: `next_world` blocks until a world is formed and returns it, or None when this worker is not needed any more;
    `failed` records why an attempt broke and says whether the run may go on; `publish` records an event.
    """

    device: torch.device

    def next_world(self) -> World | None: ...
    def signals(self) -> Signals: ...
    def publish(self, event: Event) -> None: ...
    def failed(self, step: int, error: BaseException) -> None: ...


def form_world(
    store: dist.Store,
    rank: int,
    size: int,
    attempt: int,
    device: torch.device,
    skip: frozenset[int] = frozenset(),
    timeouts: Timeouts = _DEFAULT,
    progress: Progress | None = None,
    node: str | None = None,
) -> World:
    """Forms the groups of an attempt over `store`. A collective; raises PeerLost."""
    groups = Groups.form(store, rank, size, attempt, device, timeouts)
    world = World(rank, size, attempt, groups, skip, progress or Progress(), node or socket.gethostname())
    world.progress.begin(attempt, rank)
    return world


def local_device() -> torch.device:
    """The accelerator this process was given. Under torchrun `LOCAL_RANK` picks it; Ray shows a worker only its own."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
