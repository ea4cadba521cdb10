"""Collectives of tensors, by gloo on CPU and by NCCL on CUDA."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_LOOK = timedelta(seconds=0.05)  # interval at which a wait for gloo checks `aborted`
_POLL_S = 0.001
_BUCKET_BYTES = 25 * 2**20  # size of most buckets of gradients


class Communicator(Protocol):
    """Asynchronous collectives over all ranks of a world, in place.

    Another thread may abort running collectives. Gloo then raises an error; NCCL completes with partial sums and
    without an error. So results may be used only after `Groups.gate`.
    """

    abort_leaves_garbage: ClassVar[bool]  # in tensors that are being received
    group: dist.ProcessGroup  # for collectives that torch starts itself
    under_way: list[dist.Work]  # started and not waited for yet

    def sum(self, tensor: Tensor) -> None:
        """Start the sum of a tensor over all ranks."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Start the copy of rank `source`'s tensor to every rank."""
        ...

    def wait(self) -> None:
        """Make later computations see the results; the host may return earlier."""
        ...

    def synchronize(self) -> None:
        """Make the host wait for all results, or for the abort."""
        ...

    def abort(self) -> None:
        """End all collectives and refuse more; callable from any thread.

        `Groups.abort` sets `Groups.aborted` first, and then calls this method.
        """
        ...


class GlooCommunicator:
    """Collectives by gloo.

    A collective that fails raises an error in `wait`.
    """

    abort_leaves_garbage: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup, aborted: threading.Event) -> None:
        self.group = group
        self._aborted = aborted
        self.under_way: list[dist.Work] = []

    def sum(self, tensor: Tensor) -> None:
        self.under_way.append(self.group.allreduce([tensor]))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        self.under_way.append(self.group.broadcast([tensor], options))

    def wait(self) -> None:
        """Wait for every result.

        Raises:
            RuntimeError: a collective has failed.
        """
        for work in self.under_way:
            # After an abort the collectives stay in the list, so that the end of the groups knows of them.
            if not arrived(work, self._aborted):
                return
            work.wait()
        self.under_way.clear()

    def synchronize(self) -> None:
        self.wait()

    def abort(self) -> None:
        # Gloo's own abort and shutdown release no waiting thread. `Groups.abort` shuts down the sockets instead.
        return


def arrived(work: dist.Work, aborted: threading.Event) -> bool:
    """Wait for a collective of gloo; return False after an abort."""
    # When a connection ends, gloo wakes threads that wait for a message to begin, but not threads in the middle of a
    # message, which would wait until the collective's time-out.
    while not (work.is_completed() or aborted.is_set()):
        with contextlib.suppress(RuntimeError):  # incomplete, or failed, which `work.wait` raises again
            if work.wait(_LOOK):
                break
    return not aborted.is_set()


class NcclCommunicator:
    """Collectives by NCCL, whose kernels wait for the peers' kernels.

    Args:
        group: a group of NCCL alone, bound to its device.
        abort: ends the communicator, which may take long, because it waits for the driver.
        bound_s: time limit of the abort. A process that cannot end its kernels can only end itself.
    """

    abort_leaves_garbage: ClassVar[bool] = True

    def __init__(self, group: dist.ProcessGroup, abort: Callable[[], object], bound_s: float) -> None:
        self.group = group
        self._abort = abort
        self._bound_s = bound_s
        # An abort frees the communicator even while another thread starts a collective.
        self._launching = threading.Lock()
        self._ending_lock = threading.Lock()  # nobody launches under it
        self._ending: threading.Thread | None = None
        self.under_way: list[dist.Work] = []

    def connect(self, device: torch.device, limit_s: float, aborted: threading.Event) -> None:
        """Connect to all ranks by first collectives. A collective.

        On failure the communicator is aborted, since the shutdown of a connecting or failed communicator raises.

        Raises:
            RuntimeError: a rank is gone or late, `aborted` was set, or this rank's device has failed.
        """
        until_s = time.monotonic() + limit_s
        # NCCL connects an algorithm at its first use. With the sizes and the type of a step, no step connects one.
        bucket = torch.zeros(_BUCKET_BYTES // 4, dtype=torch.float32, device=device)
        try:
            self.sum(bucket[:1])
            self.sum(bucket)
            self.broadcast(bucket, 0)
            # If a rank dies between its connection and its first kernel, the kernels of other ranks wait for ever.
            are_complete = self._mark()
            while not are_complete():
                if aborted.wait(_POLL_S):
                    raise RuntimeError("the world was aborted while NCCL connected")
                if time.monotonic() >= until_s:
                    raise RuntimeError(f"NCCL's first collectives took longer than {limit_s:g} s")
        except RuntimeError:
            self.abort()
            self._join()
            raise

    def sum(self, tensor: Tensor) -> None:
        with self._launching:
            if self._ending is None:
                self.under_way.append(self.group.allreduce([tensor]))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        with self._launching:
            if self._ending is None:
                self.under_way.append(self.group.broadcast([tensor], options))

    def wait(self) -> None:
        for work in self.under_way:
            work.wait()  # only the device's stream waits, not the host
        self.under_way.clear()

    def synchronize(self) -> None:
        self.wait()
        self._join()
        torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        # On a thread of its own, because the calling thread sends heartbeats, without which the coordinator declares
        # this process dead. The caller does not wait for a starting collective either, which may connect to a dead
        # peer.
        with self._ending_lock:
            if self._ending is not None:
                return
            ending = threading.Thread(target=self._end, daemon=True, name="abort")
            ending.start()
            # Set once the thread runs, because `synchronize` on another thread joins it.
            self._ending = ending
        threading.Thread(target=self._bound, args=(ending,), daemon=True, name="abort-bound").start()

    def _mark(self) -> Callable[[], bool]:
        """Return a check of whether all collectives launched so far are complete."""
        self.wait()
        event = torch.cuda.Event()
        event.record()
        return event.query

    def _join(self) -> None:
        if self._ending is not None:
            self._ending.join()

    def _end(self) -> None:
        with self._launching, contextlib.suppress(RuntimeError):  # it has failed already
            self._abort()

    def _bound(self, ending: threading.Thread) -> None:
        ending.join(self._bound_s)
        # The coordinator sees a death at once, but it would wait long for a process whose kernels never end.
        if ending.is_alive():
            os._exit(1)
