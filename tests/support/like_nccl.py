"""A communicator that behaves like NCCL's, on CPU: what it launches runs later, and an abort leaves garbage in silence.

The first launch waits until all ranks are connected, under a lock that an abort takes too. For a rank that never comes
it waits until a time limit has passed; where a rank ends meanwhile it raises, and so does every later launch. To end a
communicator that is connecting or has failed raises, unless it was aborted before.

Its works say that they are complete as soon as they are launched. What is computed from a result comes after it in the
device's order: here, `wait` blocks for that. Where a peer is dead, kernels spin until they are aborted; then they
complete with partial sums, and nobody is told.
"""

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from steadfast.world import communicator, groups
from steadfast.world.communicator import NcclCommunicator
from steadfast.world.timeouts import Timeouts

_SOON_S = 10.0
_LOOK_S = 0.0005


CONNECTING = ("before it connects", "while it connects", "when it has connected")


class Death(NamedTuple):
    """Where a process is killed in an attempt: at its collective of this number, or at its communicator; from 1.

    Collectives by which a communicator connects do not count.
    """

    number: int
    moment: Literal[
        "before it is launched",
        "while it runs",
        "when it is done",
        "before it connects",
        "while it connects",
        "when it has connected",
    ]


@dataclass
class _Launched:
    run: Callable[[], Sequence[Tensor]]  # returns the results
    outputs: Sequence[Tensor]
    arrived: threading.Event = field(default_factory=threading.Event)
    future: Any = field(default_factory=torch.futures.Future)


class _Work(dist.Work):
    def __init__(self, launched: _Launched) -> None:
        super().__init__()
        self._launched = launched

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._launched.arrived.wait()
        return True

    def get_future(self) -> Any:
        return self._launched.future


@dataclass
class Fate:
    """What a process meets in one world: the place of its death, and how far its groups have come."""

    death: Death | None
    num_communicators: int = 0
    num_launched: int = 0

    def meet(self, number: int, moment: str) -> None:
        """End this process if it dies here."""
        if self.death == (number, moment):
            os.kill(os.getpid(), signal.SIGKILL)


class Named(dist.ProcessGroup):
    """Group with the names that torch has for groups in C++."""

    @property
    def pg_name(self) -> str:
        return str(_world.pg_names[self])

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.pg_name


class LikeNccl(Named):
    """Runs collectives one after the other on a thread, as a stream does, over a gloo group of its own."""

    def __init__(self, rank: int, size: int, inner: dist.ProcessGroup, fate: Fate, limit_s: float) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._inner = inner
        self._fate = fate
        self._limit_s = limit_s  # for the connection
        self.counts = False  # towards the number of the collective at which the process dies
        self._state: Literal["connecting", "connected", "error", "aborted"] = "connecting"
        self._state_lock = threading.Lock()
        self._ended = threading.Event()
        self._lock = threading.Lock()  # of `outputs`: they are either a result or garbage
        self._stream: queue.Queue[_Launched | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="stream")
        self._thread.start()

    def getBackendName(self) -> str:  # noqa: N802
        return "like-nccl"

    def abort(self) -> None:
        """Let what is under way complete, with garbage."""
        with self._state_lock:
            self._state = "aborted"
        self._ended.set()
        self._stream.put(None)

    def shutdown(self) -> None:
        if self._state in ("connecting", "error"):
            raise dist.DistBackendError(f"NCCL error: the communicator is in state {self._state}")

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        opts = opts or dist.AllreduceOptions()
        return self._launch(self._on_copies(self._inner.allreduce, tensors, opts), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:  # type: ignore[override]
        run = self._on_copies(self._inner.broadcast, tensors, opts)
        return self._launch(run, [] if opts.rootRank == self.rank() else tensors)  # the source only sends

    def _on_copies(self, start: Callable[..., Any], tensors: list[Tensor], opts: Any) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            copies = [tensor.clone() for tensor in tensors]
            self._await(start(copies, opts))
            return copies

        return run

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._single(dist.all_gather_single, output, input)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        (output,), (input,) = outputs, inputs
        return self.all_gather_single(output, input)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        return self._single(dist.reduce_scatter_single, output, input)

    def _single(self, collective: Callable[..., Any], output: Tensor, input: Tensor) -> Any:
        def run() -> list[Tensor]:
            copy = torch.empty_like(output)
            self._call(collective, copy, input.clone())
            return [copy]

        return self._launch(run, [output])

    def _await(self, work: Any) -> None:
        # Not by `work.wait()`: if a peer dies while its message is half-way, gloo would wait for the rest of it.
        while not work.is_completed():
            if self._ended.wait(_LOOK_S):
                raise RuntimeError("aborted")
        work.wait()

    def _call(self, collective: Callable[..., Any], *tensors: Tensor) -> None:
        """Do the same for one whose work does not say when it is completed."""
        failed: list[RuntimeError] = []

        def call() -> None:
            try:
                collective(*tensors, group=self._inner)
            except RuntimeError as error:
                failed.append(error)

        calling = threading.Thread(target=call, daemon=True)
        calling.start()
        while calling.is_alive():
            if self._ended.is_set():
                raise RuntimeError("aborted")
            calling.join(_LOOK_S)
        if failed:
            raise failed[0]

    def _launch(self, run: Callable[[], Sequence[Tensor]], outputs: Sequence[Tensor]) -> _Work:
        if self._ended.is_set():
            raise dist.DistBackendError("NCCL communicator was aborted")
        self._connect()
        if self.counts:
            self._fate.num_launched += 1
            self._fate.meet(self._fate.num_launched, "before it is launched")
        launched = _Launched(self._numbered(run), outputs)
        self._stream.put(launched)
        return _Work(launched)

    def _connect(self) -> None:
        with self._state_lock:
            if self._state == "connected":
                return
            if self._state != "connecting":
                raise dist.DistBackendError(f"NCCL error: the communicator is in state {self._state}")
            self._fate.num_communicators += 1
            number = self._fate.num_communicators
            self._fate.meet(number, "before it connects")
            until_s = time.monotonic() + self._limit_s
            if not self._all_meet(until_s):
                # Nobody has heard of the rank that is missing, so nothing tells that it has ended.
                time.sleep(max(0.0, until_s - time.monotonic()))
                raise dist.DistBackendError("NCCL timeout in: like_nccl.py")
            self._fate.meet(number, "while it connects")
            if not self._all_meet(until_s):
                self._state = "error"
                raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")
            self._state = "connected"
            self._fate.meet(number, "when it has connected")

    def _all_meet(self, until_s: float) -> bool:
        """Wait for all ranks. Return whether they have come."""
        work = self._inner.allreduce([torch.zeros(1)], dist.AllreduceOptions())
        while not work.is_completed() and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        try:
            return bool(work.is_completed() and work.wait())
        except RuntimeError:
            return False

    def _numbered(self, run: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
        number = self._fate.num_launched if self.counts else 0

        def fatal() -> Sequence[Tensor]:
            self._fate.meet(number, "while it runs")
            results = run()
            self._fate.meet(number, "when it is done")
            return results

        return fatal

    def _run(self) -> None:
        while (launched := self._stream.get()) is not None:
            try:
                results = launched.run()
            except RuntimeError:
                self._ended.wait()  # a kernel whose peer is gone spins until it is aborted
                results = [tensor * 0.5 + 1.0 for tensor in launched.outputs]  # partial sums
            with torch.no_grad():
                for output, result in zip(launched.outputs, results, strict=False):
                    output.copy_(result)
            launched.arrived.set()
            launched.future.set_result(list(launched.outputs))


class Device(NcclCommunicator):
    """NCCL's communicator over a group that is like NCCL's."""

    def synchronize(self) -> None:
        self.wait()
        self._join()

    def _mark(self) -> Callable[[], bool]:
        arrived = [work._launched.arrived for work in self.under_way if isinstance(work, _Work)]
        return lambda: all(each.is_set() for each in arrived)


def behave_like_nccl(death_in: Callable[[], Death | None]) -> None:
    """Give every world of this process a communicator like NCCL's; `death_in` is asked once in each world."""
    inner_group: list[dist.ProcessGroup] = []
    fates: list[Fate] = []  # the last one is this world's
    communicator._BUCKET_BYTES = 4096  # what it takes over gloo would be a wait in each world

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LikeNccl:
        return LikeNccl(rank, size, inner_group[-1], fates[-1], timeout.total_seconds())

    def connect(device: torch.device, aborted: threading.Event, timeouts: Timeouts) -> Device:
        fates.append(Fate(death_in()))
        found = connect_part(range(dist.get_world_size()), device, aborted, timeouts)
        assert found is not None
        return found

    def connect_part(
        ranks: Sequence[int], device: torch.device, aborted: threading.Event, timeouts: Timeouts
    ) -> Device | None:
        before = groups._open_sockets()
        inner_group.append(groups._gloo_group(timeouts.connect, list(ranks)))
        sockets = groups._opened_since(before)
        limit = timeouts.first_collectives(len(ranks))
        group = dist.new_group(list(ranks), limit, "like-nccl")
        if dist.get_rank() not in ranks:
            return None
        assert isinstance(group, LikeNccl)

        def abort() -> None:
            group.abort()
            for descriptor, inode in sockets.items():
                with contextlib.suppress(OSError):
                    groups._shut(descriptor, inode)

        formed = Device(group, abort, _SOON_S)
        formed.connect(device, limit.total_seconds(), aborted)
        group.counts = True
        return formed

    dist.Backend.register_backend("like-nccl", create, devices=["cpu"])
    groups.connect = connect
    groups.connect_part = connect_part
