"""The process groups of one attempt, and how they end when a peer is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout, _world

from app.timeouts import Timeouts

_SIOCGIFADDR = 0x8915
_POLL_S = 0.0005
_FREED_S = 1.0  # in which an abort frees whoever waits, if it can
_left_behind: list[tuple[dist.ProcessGroup, ...]] = []  # groups whose end would wait for a thread that is not freed


class PeerLost(Exception):
    """A collective failed because another member of the world is gone. Ends the attempt, not the run."""


class Communicator(Protocol):
    def abort(self) -> None: ...


@dataclass(frozen=True)
class Groups:
    """One generation of process groups.

    control: a gloo group of the whole world for host data.
    store: of this generation; it ends with the attempt.
    sockets: descriptor -> inode of what forming opened.
    communicators: what `abort()` ends on the device: NCCL's, none on CPU.
    aborted: set when `abort()` is called.
    sides: more groups, formed later. under_way: collectives that nobody waits for when the attempt ends.
    """

    control: dist.ProcessGroup
    store: dist.Store
    sockets: dict[int, int]
    communicators: tuple[Communicator, ...] = ()
    aborted: threading.Event = field(default_factory=threading.Event)
    sides: list[dist.ProcessGroup] = field(default_factory=list)
    under_way: list[dist.Work] = field(default_factory=list)

    @classmethod
    def form(
        cls, store: dist.Store, rank: int, size: int, generation: int, device: torch.device, timeouts: Timeouts
    ) -> Groups:
        """Forms the default group (NCCL for CUDA tensors, gloo for host data) and the control group. A collective.

        Raises:
            PeerLost: a member did not come, or died while forming.
        """
        before = _open_sockets()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        prefixed = dist.PrefixStore(f"attempt-{generation}", store)
        # By it torch names groups in the store, and it counts on where forming has failed: whoever was there would look
        # for newcomers under another name than theirs, for ever.
        _world.group_count = 0
        try:
            prefixed.set(f"here/{rank}", "")
            prefixed.wait([f"here/{each}" for each in range(size)], timeouts.form)
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=timeouts.connect)
            control = dist.new_group(backend="gloo", timeout=timeouts.connect)
        except (RuntimeError, dist.DistError) as error:
            _destroy()  # one of the two may have formed
            raise PeerLost(f"forming a world of {size} failed: {error}") from error
        for group in (None, control):
            _set_pg_timeout(timeouts.collective, group)
        opened = {fd: inode for fd, inode in _open_sockets().items() if before.get(fd) != inode}
        on_device = (_get_default_group()._get_backend(device),) if device.type == "cuda" else ()
        return cls(control, prefixed, opened, on_device)

    def abort(self) -> None:
        """Makes every collective that is under way raise, here and at the peers. Safe from any thread.

        NCCL's kernels spin on the device until their communicator is aborted, so that comes first. Gloo's own abort and
        shutdown free nothing, and its sockets stay open for as long as anything, a traceback say, refers to the group.
        """
        self.aborted.set()
        for communicator in self.communicators:
            with contextlib.suppress(RuntimeError):  # it has failed already
                communicator.abort()
        for descriptor, inode in list(self.sockets.items()):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.fstat(descriptor).st_ino == inode:
                    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                        # A listener that is shut ends the process: gloo's thread throws where nobody catches.
                        if not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            duplicate.shutdown(socket.SHUT_RDWR)

    def wait(self, works: Iterable[dist.Work]) -> None:
        """For collectives that are under way, and in which a rank may only send, or only receive.

        When a connection ends, gloo tells those who wait for a message to begin, but nobody whose message is half-way:
        they would wait for `timeouts.collective`. They are left behind, with their thread and their group.

        Raises:
            RuntimeError: a collective has failed.
            PeerLost: the groups have been aborted; what was to be received may be garbage.
        """
        works = list(works)
        try:
            for work in works:
                while not work.is_completed() and not self.aborted.is_set():
                    time.sleep(_POLL_S)
                if self.aborted.is_set():
                    raise PeerLost("the world was aborted")
                work.wait()
        except (RuntimeError, PeerLost):
            if not _all_complete(works, _FREED_S):
                _left_behind.append((_get_default_group(), self.control, *self.sides))
            raise

    def side_group(self) -> dist.ProcessGroup:
        """Another gloo group of the whole world, for what may take long beside the rest. A collective."""
        before = _open_sockets()
        group: dist.ProcessGroup = dist.new_group(backend="gloo")
        self.sockets.update({fd: inode for fd, inode in _open_sockets().items() if before.get(fd) != inode})
        self.sides.append(group)
        return group

    def destroy(self) -> None:
        if self.under_way and not _all_complete(self.under_way, _FREED_S):
            _left_behind.append((_get_default_group(), self.control, *self.sides))
        _destroy()


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _all_complete(works: list[dist.Work], within_s: float) -> bool:
    until = time.monotonic() + within_s
    while not (completed := all(work.is_completed() for work in works)) and time.monotonic() < until:
        time.sleep(_POLL_S)
    return completed


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


def interface_of(address: str) -> str | None:
    """The name of this machine's network interface with an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it is down, or has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _open_sockets() -> dict[int, int]:
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found[int(name)] = os.fstat(int(name)).st_ino
    return found
