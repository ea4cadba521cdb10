"""Process groups of one attempt, and their abort after a loss.

tests/unit/test_torch_internals.py checks the private names of torch.distributed that this module uses.
"""

import contextlib
import fcntl
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store, _world

from steadfast.world.communicator import Communicator, GlooCommunicator, NcclCommunicator, arrived
from steadfast.world.timeouts import Timeouts

_SIOCGIFADDR = 0x8915  # Linux's request for the IPv4 address of an interface
_POLL_S = 0.0005
_RELEASE_S = 1.0  # if an abort can release waiting threads at all, it does so within this time
# Settings of torch.distributed.ProcessGroupNCCL, whose abort "should be used with TORCH_NCCL_ASYNC_ERROR_HANDLING
# turned off".
_IN_PROCESS_RECOVERY = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
# Settings of gloo, with which a rank reads the addresses of all ranks by one request to the store, and an address has
# no number for each connection. Without them a group of n ranks takes 3 n^2 requests and 8 n^3 bytes.
_SHORT_RENDEZVOUS = {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}
_abandoned: list[tuple[dist.ProcessGroup, ...]] = []

# Gloo has no exception of its own: a lost peer is a RuntimeError, which only its text distinguishes from a bug.
# If the peer has ended: "[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer", or "reset" for "closed".
# If it is silent: "[.../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation".
# After the latter, every further collective of the group: "Application timeout caused pair closure".
# The text does not distinguish a dead peer from an unreachable one; the coordinator knows which workers live.
_MARKS = ("/gloo/", "caused pair closure")
# Texts of gloo, NCCL and their stores that an error of user code may contain too.
_COMMON_MARKS = ("gloo", "nccl", "connection closed by peer", "connection reset", "broken pipe", "socket", "tcpstore")
# Texts of torch and NCCL for a failure of this rank's own GPU.
_DEVICE_MARKS = ("cuda error", "cuda failure", "unhandled cuda")
# Code that calls collectives: this program, and the parts of torch through which C++ raises, `loss.backward()`
# included.
_TORCH = Path(torch.__file__).parent
_CALLERS = (
    Path(__file__).parents[1],
    _TORCH / "distributed",
    _TORCH / "nn" / "parallel",
    _TORCH / "autograd",
    _TORCH / "_ops.py",
)


class PeerLost(Exception):
    """Failure of a collective whose peer is gone, which ends the attempt."""


class WorldRank(NamedTuple):
    """Place of this process among the ranks of one attempt's world."""

    rank: int
    size: int  # number of ranks
    attempt: int


@dataclass(frozen=True)
class Groups:
    """Process groups of one attempt."""

    control: dist.ProcessGroup  # gloo, of the whole world, for host data; on CUDA the default group
    communicator: Communicator  # for tensors on the device
    store: dist.Store  # of this attempt alone
    sockets: dict[int, int]  # descriptor -> inode of each socket that gloo has opened
    aborted: threading.Event  # set before a communicator is aborted
    timeouts: Timeouts = field(default_factory=Timeouts)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # whose memory the communicator reaches
    axes: list[Communicator] = field(default_factory=list)  # for lines of ranks, see `add_axis`
    sides: list[dist.ProcessGroup] = field(default_factory=list)
    under_way: list[dist.Work] = field(default_factory=list)  # collectives that may be incomplete at the attempt's end

    @classmethod
    def form(
        cls,
        store: dist.Store,
        own: WorldRank,
        device: torch.device,
        timeouts: Timeouts,
        aborted: threading.Event | None = None,
    ) -> Self:
        """Form the groups of gloo and the device's communicator. A collective.

        Args:
            aborted: event by which another thread ends the first collectives of the device.

        Raises:
            PeerLost: a member did not come, or died meanwhile.
            RuntimeError: this rank's device has failed, or has no memory left.
        """
        probe(device)
        before = _open_sockets()
        prefixed = dist.PrefixStore(f"attempt-{own.attempt}", store)
        # Torch names groups in the store by this count, which keeps rising after a failure to form. A survivor would
        # then wait for new workers under another name than theirs, without end.
        _world.group_count = 0
        aborted = aborted or threading.Event()
        for name, value in _SHORT_RENDEZVOUS.items():
            os.environ.setdefault(name, value)
        try:
            # A connection has a shorter limit than a meeting, so all members meet before the first one connects.
            if prefixed.add("here", 1) == own.size:
                prefixed.set("all here", "")
            prefixed.wait(["all here"], timeouts.form)
            with _limited(prefixed, timeouts.connect):
                dist.init_process_group(
                    "gloo", store=prefixed, rank=own.rank, world_size=own.size, timeout=timeouts.connect
                )
            control = _get_default_group()
            if device.type != "cuda":
                # Gloo sums the gradients in the default group. An abort does not free a rank in the middle of a
                # gradient, see `arrived`, and control messages must not queue behind it.
                control = _gloo_group(timeouts.connect)
            # Recorded before NCCL connects, because NCCL closes its own sockets.
            sockets = _opened_since(before)
            communicator = connect(device, aborted, timeouts)
        except (RuntimeError, dist.DistError) as error:
            _destroy(abort=True)  # a group may have formed already
            if is_own_fault(error):
                raise
            # NCCL may report a failure of this rank's own GPU as an error of the system or of a peer.
            probe(device)
            raise PeerLost(f"forming a world of {own.size} failed: {error}") from error
        # Until here a member that does not connect is noticed soon. From here on a collective may wait for a peer that
        # writes a checkpoint.
        for group in (_get_default_group(), control):
            group.set_timeout(timeouts.collective)
        return cls(control, communicator, prefixed, sockets, aborted, timeouts=timeouts, device=device)

    def gate(self) -> None:
        """Wait for all collectives, whose results are valid from here on.

        Raises:
            PeerLost: the groups have been aborted, so results may be garbage.
        """
        # In this order: `aborted` is set before any collective is cut short, so results are complete while it is not
        # set.
        for communicator in self._communicators:
            communicator.synchronize()
        if self.aborted.is_set():
            raise PeerLost("the world was aborted")

    def add_axis(self, lines: Iterable[Sequence[int]]) -> list[Communicator]:
        """Form a communicator for each line of ranks. A collective of the world.

        Returns the communicators of the lines in which this rank is.

        Args:
            lines: ranks of each line, as from `World.lines`; the same on all ranks. If there are several replicas, the
                first axis of an attempt must be "replicate".

        Raises:
            PeerLost: a member died meanwhile.
        """
        mine: list[Communicator] = []
        before = _open_sockets()
        try:
            # Torch requires that every rank forms all groups, in the same order.
            for ranks in lines:
                communicator = connect_part(ranks, self.device, self.aborted, self.timeouts)
                if communicator is not None:
                    mine.append(communicator)
        except (RuntimeError, dist.DistError) as error:
            if is_own_fault(error):
                raise
            raise PeerLost(f"forming an axis of the world failed: {error}") from error
        if self.device.type != "cuda":  # NCCL closes its own sockets
            self.sockets.update(_opened_since(before))
        self.axes.extend(mine)
        return mine

    def reaches(self, tensor: Tensor) -> bool:
        """Return whether the communicator reaches the memory of a tensor."""
        return tensor.device.type == self.device.type

    @property
    def across(self) -> Communicator:
        """Return the communicator of ranks with the same part of the model."""
        return self.axes[0] if self.axes else self.communicator

    @property
    def _communicators(self) -> list[Communicator]:
        return [self.communicator, *self.axes]

    def side_group(self) -> dist.ProcessGroup:
        """Form another gloo group of the world, for long transfers. A collective."""
        before = _open_sockets()
        group = _gloo_group(self.timeouts.collective)
        self.sockets.update(_opened_since(before))
        self.sides.append(group)
        return group

    def abort(self) -> None:
        """Make all running collectives raise, here and at the peers.

        Any thread may call it.
        """
        self.aborted.set()
        # Communicators come first, because NCCL's kernels spin on the device until the abort.
        for communicator in self._communicators:
            communicator.abort()
        # Gloo's own abort and shutdown release no waiting thread, and its sockets stay open while any object, such as a
        # traceback, refers to the group. So the sockets are shut down directly.
        for descriptor, inode in list(self.sockets.items()):
            with contextlib.suppress(OSError):  # closed meanwhile
                _shut(descriptor, inode)

    def wait(self, works: Iterable[dist.Work]) -> None:
        """Wait for collectives in which ranks may only send or receive.

        Raises:
            RuntimeError: a collective has failed.
            PeerLost: the groups have been aborted, so received data may be garbage.
        """
        works = list(works)
        try:
            for work in works:
                if not arrived(work, self.aborted):
                    raise PeerLost("the world was aborted")
                work.wait()
        except (RuntimeError, PeerLost):
            self._abandon_if_stuck(works)
            raise

    def destroy(self) -> None:
        """Destroy all groups, so that this process can join another world."""
        # Collectives that an abort has left running may still write to gradients, which the next attempt uses.
        left = [*self.under_way]
        for communicator in self._communicators:
            with contextlib.suppress(RuntimeError):
                communicator.synchronize()
            left += communicator.under_way
        self._abandon_if_stuck(left)
        _destroy(abort=self.aborted.is_set())

    def _abandon_if_stuck(self, works: list[dist.Work]) -> None:
        # Destroying a group waits for its threads. A group with a stuck thread is kept until the process ends.
        until_s = time.monotonic() + _RELEASE_S
        while not all(work.is_completed() for work in works):
            if time.monotonic() >= until_s:
                axes = [communicator.group for communicator in self.axes]
                _abandoned.append((_get_default_group(), self.control, *self.sides, *axes))
                return
            time.sleep(_POLL_S)


def probe(device: torch.device) -> None:
    """Run one kernel on a device, so that its own failure is not taken for a lost peer.

    Raises:
        RuntimeError: the device has failed. CUDA repeats its first fatal error at every later call of the process.
    """
    if device.type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)


def serve_store(host: str) -> dist.TCPStore:
    """Serve a store for one world, on one address of this machine."""
    # Torch's server has no authentication and lists its keys to any client, so secret names would not help. It listens
    # on one interface only, which is the loopback if all workers are local.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port = listener.getsockname()[1]
    # The store closes the descriptor that it is given.
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(device: torch.device, aborted: threading.Event, timeouts: Timeouts) -> Communicator:
    """Connect the communicator of a device over all ranks. A collective."""
    if device.type != "cuda":
        return GlooCommunicator(_get_default_group(), aborted)
    communicator = _connect_nccl(range(dist.get_world_size()), device, aborted, timeouts)
    assert communicator is not None
    return communicator


def connect_part(
    ranks: Sequence[int], device: torch.device, aborted: threading.Event, timeouts: Timeouts
) -> Communicator | None:
    """Connect some ranks, and return None on the rest. A collective of all ranks."""
    if device.type == "cuda":
        return _connect_nccl(ranks, device, aborted, timeouts)
    group = _gloo_group(timeouts.connect, ranks)
    if dist.get_rank() not in ranks:
        return None
    group.set_timeout(timeouts.collective)
    return GlooCommunicator(group, aborted)


def _gloo_group(limit: timedelta, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Form a gloo group of some ranks, None for all. A collective of all ranks."""
    with _limited(_get_default_store(), limit):
        group: dist.ProcessGroup = dist.new_group(ranks and list(ranks), limit, "gloo")
    return group


@contextlib.contextmanager
def _limited(store: dist.Store, limit: timedelta) -> Iterator[None]:
    """Limit the time in which gloo waits for addresses in a store."""
    # Gloo reads all addresses at once by a request that ignores the group's time-out.
    former = store.timeout  # type: ignore[attr-defined]  # the stub lacks it
    store.set_timeout(limit)
    try:
        yield
    finally:
        store.set_timeout(former)


def _connect_nccl(
    ranks: Sequence[int], device: torch.device, aborted: threading.Event, timeouts: Timeouts
) -> Communicator | None:
    # Torch registers a blocking communicator only after it has connected. Before that, an abort does not reach the
    # communicator, and NCCL waits for a missing rank without a limit. So the communicator is non-blocking.
    limit = timeouts.first_collectives(len(ranks))
    # The first launch waits so long for the connection, under a lock that an abort takes too. Torch reads the variable
    # once per process.
    os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] = str(math.ceil(limit.total_seconds()))
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options._timeout = timeouts.form  # or torch warns that the argument below is another one
    # Given its device, the group connects now.
    group = dist.new_group(list(ranks), timeouts.form, nccl(), pg_options=options, device_id=device)
    if dist.get_rank() not in ranks:
        return None
    backend = group._get_backend(device)
    backend._set_default_timeout(timeouts.collective)
    abort = partial(_abort_soon, backend, timeouts.silence_s)
    communicator = NcclCommunicator(group, abort, 2 * timeouts.silence_s)
    communicator.connect(device, limit.total_seconds(), aborted)
    return communicator


def nccl() -> str:
    """Return torch's name of the backend that is a ProcessGroupNCCL."""
    # From torch 2.15 on "nccl" is another class, with other time-outs and aborts than this module relies on.
    return "nccl-legacy" if "nccl-legacy" in dist.Backend.backend_list else "nccl"


def _abort_soon(backend: Any, limit_s: float) -> None:
    # Torch's abort waits for up to the group's time-out, and the limit of a collective is half an hour.
    backend._set_default_timeout(timedelta(seconds=limit_s))
    backend.abort()


def recover_in_process() -> None:
    """Disable torch's own reaction to NCCL failures, before the first group.

    Torch's watchdog would end this process, which is to survive its peers, up to a minute after their death.
    """
    for name, value in _IN_PROCESS_RECOVERY.items():
        os.environ.setdefault(name, value)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that this rank lacks memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return _names_device(error) and "out of memory" in str(error).lower()


def is_own_fault(error: BaseException) -> bool:
    """Return whether an error is a failure of this rank's device or memory."""
    return is_out_of_memory(error) or _names_device(error)


def _names_device(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _contains_any(error, _DEVICE_MARKS)


def _contains_any(error: BaseException, marks: Iterable[str]) -> bool:
    text = str(error).lower()
    return any(mark in text for mark in marks)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether an error means an unreachable peer, not a bug."""
    if isinstance(error, PeerLost):
        return True
    if is_own_fault(error):
        return False  # NCCL reports failures of the device too
    if isinstance(error, dist.DistError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if _contains_any(error, _MARKS):
        return True
    return _contains_any(error, _COMMON_MARKS) and _raised_by_caller(error)


def _raised_by_caller(error: BaseException) -> bool:
    """Return whether the code that raised an error calls collectives, if known."""
    innermost = error.__traceback__
    if innermost is None:
        return True
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    file = Path(innermost.tb_frame.f_code.co_filename)
    return any(file.is_relative_to(caller) for caller in _CALLERS)


def interface_of(address: str) -> str | None:
    """Return the name of this machine's network interface with an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface is down, or has no address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def prefer_interface_of(address: str) -> None:
    """Make gloo and NCCL use the interface with this address, unless the user chose one."""
    # A host's own name often resolves to its loopback, and gloo would listen there.
    if interface := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=" excludes interfaces that merely begin so


def _destroy(abort: bool) -> None:
    if not dist.is_initialized():
        return
    # In torch's order. Torch itself stops at the first group that raises, which would leave the default group.
    for group in sorted(_world.pg_names, key=lambda each: _world.pg_names[each], reverse=True):
        # Without an abort the end of a communicator that is still connecting would wait for its peers.
        if abort:
            with contextlib.suppress(RuntimeError):
                group.abort()
        with contextlib.suppress(RuntimeError):
            group.shutdown()
    # Cleared, so that torch does not shut the groups down again.
    _world.pg_names.clear()
    dist.destroy_process_group()


def _open_sockets() -> dict[int, int]:
    found: dict[int, int] = {}
    # Other threads open and close descriptors meanwhile.
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found[int(name)] = os.fstat(int(name)).st_ino
    return found


def _opened_since(before: dict[int, int]) -> dict[int, int]:
    return dict(_open_sockets().items() - before.items())


def _shut(descriptor: int, inode: int) -> None:
    # Duplicated before the check: at any time the training thread may close the descriptor, and open a socket of the
    # next world under the same number.
    duplicate = os.dup(descriptor)
    try:
        if os.fstat(duplicate).st_ino != inode:
            return
        with socket.socket(fileno=os.dup(duplicate)) as stream:
            # Shutting down a listener would end the process, because gloo's thread raises an uncaught exception.
            if not stream.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                stream.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(duplicate)
