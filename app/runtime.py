"""What a worker asks of whoever started it: a world to train in, signals, and somewhere to publish.

`Runtime` owns the process groups: a generation of them is formed over a TCPStore under a prefix of its own, lives for
one attempt and is destroyed with it, so one process can be part of many worlds. Ray's implementation is in
app/orchestration/, torchrun's in app/torchrun.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

Event = dict[str, Any]

# Long enough for a slow store on another continent; peers that die close their sockets and are noticed at once.
FORM_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class World:
    """The set of workers of one attempt, and this worker's place in it."""

    rank: int
    size: int
    attempt: int

    @property
    def leader(self) -> bool:
        """The rank that writes: ledger, manifests, trackers, summary."""
        return self.rank == 0


@dataclass(frozen=True)
class Signals:
    """What is wished of the run from outside; nothing happens before all ranks agreed on it."""

    stop: bool = False  # end the run at the next agreed step, resumable
    leave: bool = False  # end this attempt at the next agreed step; another world follows


@dataclass(frozen=True)
class Outcome:
    """How a worker reached the end of an attempt. `resized` means that another world follows."""

    kind: Literal["finished", "stopped", "resized"]
    step: int


class PeerLost(Exception):
    """A collective failed because another member of the world is gone. Ends the attempt, not the run."""


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


def form_groups(store: dist.Store, world: World, device: torch.device) -> None:
    """Forms the default process group of an attempt (NCCL for CUDA tensors, gloo for host data).

    Raises:
        PeerLost: a member did not come, or died while forming.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    prefixed = dist.PrefixStore(f"attempt-{world.attempt}", store)
    try:
        dist.init_process_group(backend, store=prefixed, rank=world.rank, world_size=world.size, timeout=FORM_TIMEOUT)
    except (RuntimeError, dist.DistError) as error:
        raise PeerLost(f"forming a world of {world.size} failed: {error}") from error


def destroy_groups() -> None:
    """Ends the generation. Closing its sockets is also how peers that still wait in a collective learn of it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device() -> torch.device:
    """The accelerator this process was given. Under torchrun `LOCAL_RANK` picks it; Ray shows a worker only its own."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


_PEER_LOST_MARKS = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "socket",
    "tcpstore",
)


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error raised inside a step says that a peer is gone, rather than that the code is wrong.

    Gloo reports a dead peer as a plain RuntimeError, so its text is all there is to tell them apart.
    """
    if isinstance(error, PeerLost | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error).lower() for mark in _PEER_LOST_MARKS)
