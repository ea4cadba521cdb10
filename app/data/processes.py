"""Processes that read samples ahead for a worker."""

import multiprocessing
import os
import signal
import threading
from functools import partial
from multiprocessing import forkserver, resource_tracker
from typing import Any


def options_of_processes(num_workers: int, prefetch_factor: int) -> dict[str, Any]:
    """Return what a DataLoader is told of its processes. They outlive SIGTERM, but for their worker's own."""
    if not num_workers:
        return {}
    # fork breaks CUDA and Ray's threads; forkserver imports torch once, not once for each process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    _start_server()
    return {
        "multiprocessing_context": context,
        "persistent_workers": True,
        "prefetch_factor": prefetch_factor,
        "worker_init_fn": partial(_end_by, os.getpid()),
    }


def _start_server() -> None:
    # Whoever stops a run may send SIGTERM to all of its processes, while the worker has a step to finish. The server
    # would end by it; so it is started with the signal blocked, which its processes inherit.
    resource_tracker.ensure_running()  # whose start would unblock it
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _end_by(worker_pid: int, _: int) -> None:
    """Have this process end by a SIGTERM of the worker alone, as a DataLoader sends it to one that does not answer."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a server that user code has started does not block it
    threading.Thread(target=_await_end, args=(worker_pid,), daemon=True, name="end").start()


def _await_end(worker_pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != worker_pid:
        pass
    os._exit(0)
