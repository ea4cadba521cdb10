"""Start processes that read samples ahead for a worker."""

import multiprocessing
import os
import signal
import threading
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any

PREFETCHED = 2  # microbatches that each process reads ahead


def options_of_processes(num_workers: int) -> dict[str, Any]:
    """Return a DataLoader's options for its processes.

    The processes ignore SIGTERM unless the worker itself sends the signal.
    """
    if not num_workers:
        return {}
    # fork breaks CUDA and Ray's threads; forkserver imports torch once, not once for each process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    _start_server()
    return {
        "multiprocessing_context": context,
        "persistent_workers": True,
        "prefetch_factor": PREFETCHED,
        "worker_init_fn": partial(_end_by, os.getpid()),
    }


def _start_server() -> None:
    # A service manager may send SIGTERM to all processes of a run, while the worker has to finish a step. The signal
    # would end the fork server, so the server is started with the signal blocked, and its processes inherit that.
    resource_tracker.ensure_running()  # started first, because its start would unblock the signal
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _end_by(worker_pid: int, _: int) -> None:
    """Let only the worker end this loader process by SIGTERM.

    The worker's DataLoader sends SIGTERM to a loader process that does not answer. SIGTERM from any other process is
    ignored.
    """
    # a server that user code has started does not block the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_await_end, args=(worker_pid,), daemon=True, name="end").start()


def _await_end(worker_pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != worker_pid:
        pass
    os._exit(0)
