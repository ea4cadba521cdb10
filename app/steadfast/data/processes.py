"""Start processes that read samples ahead for a worker."""

import copy
import multiprocessing
import os
import signal
import threading
from functools import partial
from multiprocessing import forkserver, queues, resource_tracker
from typing import Any

from steadfast.errors import DataError
from steadfast.run.interrupts import STOP_SIGNALS

NAME = "loader process"  # of each process
PREFETCHED = 2  # microbatches that each process reads ahead
_WATCH_S = 1.0
_NO_ROOM = "enlarge it (in a container: --shm-size=8g), or use fewer data.num_workers or smaller samples"


class _Queue(queues.Queue):  # type: ignore[type-arg]  # cannot be subscripted when it runs
    """Queue that sends an error in place of a batch it cannot send."""

    # The base class only prints the error, and the worker would wait for the batch for ever.
    def _on_queue_feeder_error(self, error: Exception, item: tuple[int, Any]) -> None:
        refused = f"a loader process cannot send a batch ({error}): data.num_workers=0 starts no loader processes"
        self.put((item[0], no_room(error) or DataError(refused)))


def no_room(error: BaseException, reading: str = "") -> DataError | None:
    """Return a DataError if torch's error says that /dev/shm is full."""
    if "unable to allocate shared memory" not in str(error):
        return None
    return DataError(f"/dev/shm had no room for a batch{reading and ' '}{reading}: {_NO_ROOM}")


def options_of_processes(num_workers: int) -> dict[str, Any]:
    """Return a DataLoader's options for its processes.

    The processes end with the worker. They ignore stop signals, except SIGTERM from the worker itself.
    """
    if not num_workers:
        return {}
    # fork breaks CUDA and Ray's threads; forkserver imports torch once, not once for each process.
    context: Any = copy.copy(multiprocessing.get_context("forkserver"))
    context.set_forkserver_preload(["torch"])
    context.Process = partial(context.Process, name=NAME)
    context.Queue = partial(_Queue, ctx=context)
    _start_server()
    return {
        "multiprocessing_context": context,
        "persistent_workers": True,
        "prefetch_factor": PREFETCHED,
        "worker_init_fn": _end_with_worker,
    }


def _start_server() -> None:
    # A service manager may send SIGTERM to all processes of a run, while the worker has to finish a step. The signal
    # would end the fork server, so the server is started with such signals blocked, and its processes inherit that.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # started first, because its start unblocks SIGINT and SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _end_with_worker(_: int) -> None:
    """End this loader process when its worker has ended, or sends SIGTERM.

    The worker's DataLoader sends SIGTERM to a loader process that does not answer. SIGTERM from any other process is
    ignored while the worker lives.
    """
    # a server that user code has started does not block the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    threading.Thread(target=_await_end, args=(multiprocessing.parent_process(),), daemon=True, name="end").start()


def _await_end(worker: Any) -> None:
    # torch watches the process that has forked this one, which is the fork server and not the worker.
    while worker.is_alive():
        found = signal.sigtimedwait({signal.SIGTERM}, _WATCH_S)
        if found is not None and found.si_pid == worker.pid:
            break
    os._exit(0)
