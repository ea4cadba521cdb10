"""Fork server for workers of Ray on one machine.

A worker imports Ray, torch and this package, which takes four seconds of CPU. The fork server imports them once, and
each worker is a fork of it. The server runs no threads of its own, and never touches a GPU.
"""

import contextlib
import gc
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from steadfast.orchestration.fork_worker import RAYLET_VARIABLE, STARTED, STREAMS, receive, user_of
from steadfast.run.interrupts import STOP_SIGNALS

# Imported when the server starts.
LIBRARIES = (
    "torch._dynamo",  # imported by torch's optimizers
    "torch.utils.tensorboard",
    "pandas",  # imported by Ray Train
    "pyarrow.fs",
    "pydantic",
    "requests",
)
# Imported at the first request, because Ray reads its variables in the environment when it is imported.
RAY_AND_STEADFAST = (
    "ray._private.workers.default_worker",
    "steadfast.orchestration.internals.slots",
    "steadfast.orchestration.coordinator",
    "steadfast.orchestration.backend",
    "steadfast.orchestration.worker_runtime",
    "steadfast.worker",
)
# Libraries read these variables when they are imported. A worker whose values differ from the server's is not forked.
_READ_AT_IMPORT = ("GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH")
_REQUEST_S = 10.0  # time to receive a request
_IDLE_S = 60.0  # time without a worker after which the server of a cluster's node ends
NO_JOB = {"RAY_JOB_ID": "ffffffff"}  # Ray's id of no job
# The folder of this package comes first, as in the command.
_PROGRAM = f"import sys; sys.path[0] = {str(Path(__file__).parents[2])!r}; from {__name__} import main; main()"


class ForkServer:
    """A fork server that this process has started.

    Args:
        num_threads: number of threads for a worker's operations on the CPU.
        address: name of the server's abstract Unix socket.
        raylet: process id of a raylet. The server ends with the raylet, or after a minute without workers. Without a
            raylet, the server ends with this process.
        verbose: whether to show what the imported libraries print.

    Raises:
        OSError: there is a server at the address.
    """

    def __init__(self, num_threads: int, address: str, raylet: int | None = None, verbose: bool = False) -> None:
        # The socket accepts connections from now on, so the first workers wait for the imports of the server.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + address)
            listener.listen()
            arguments = [str(listener.fileno()), str(num_threads), *([str(raylet)] if raylet else [])]
            output = None if verbose else subprocess.DEVNULL
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                # Without a raylet the server ends at the end of this pipe, which only this process holds open.
                stdin=subprocess.DEVNULL if raylet else subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[listener.fileno()],
                cwd="/",
                start_new_session=raylet is not None,
            )

    def close(self) -> None:
        """End the server. Its workers go on."""
        self._process.kill()
        with self._process:  # waits for its end, and closes the pipe
            pass


class _Server:
    """The server's own process.

    Args:
        listener: socket on which workers are asked for.
        environment: environment with which the server has started.
        raylet: as in `ForkServer`.
    """

    def __init__(self, listener: socket.socket, environment: dict[str, str], raylet: int | None) -> None:
        self._environment = environment
        self._num_workers = 0
        self._idle_s = None if raylet is None else _IDLE_S
        self._raylet = ""  # process id of the raylet, after the first request
        self._sound = False
        self._selector = selectors.DefaultSelector()
        self._watch(listener, partial(self._accept, listener))
        self._watch(sys.stdin if raylet is None else os.pidfd_open(raylet), partial(os._exit, 0))

    def serve(self) -> dict[str, Any]:
        """Fork a process for each request, and return the request in that process."""
        while True:
            # The first event may make others invalid. Those that stay valid are reported again.
            events = self._selector.select(None if self._num_workers else self._idle_s)
            if not events:
                os._exit(0)
            key, _ = events[0]
            request: dict[str, Any] | None = key.data()
            if request is not None:
                return request

    def _watch(self, file: Any, when_readable: Callable[[], dict[str, Any] | None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, when_readable)

    def _accept(self, listener: socket.socket) -> dict[str, Any] | None:
        connection, _ = listener.accept()
        connection.settimeout(_REQUEST_S)
        with contextlib.suppress(Exception):  # another program of this user may send anything
            # Another user of the machine can connect to an abstract socket, but must not run code as this user.
            if user_of(connection) == os.getuid():
                request = receive(connection)
                if not self._may_fork(request["environment"]):
                    connection.close()
                elif self._fork(connection):
                    return request
                for stream in request[STREAMS]:
                    os.close(stream)
                return None
        connection.close()
        return None

    def _may_fork(self, environment: dict[str, str]) -> bool:
        if _read_at_import(environment) != _read_at_import(self._environment):
            return False
        if not self._raylet:
            self._raylet = environment[RAYLET_VARIABLE]
            _import_ray(environment)
            self._sound = _forks_are_sound()
        return self._sound and self._raylet == environment[RAYLET_VARIABLE]

    def _fork(self, connection: socket.socket) -> bool:
        """Fork this process, and return whether this is the fork."""
        pid = os.fork()
        if pid == 0:
            self._close()
            connection.close()
            return True
        self._num_workers += 1
        process = os.pidfd_open(pid)
        self._watch(process, partial(self._report_end, pid, process, connection))
        # The raylet ends a worker that has not registered yet by ending the program that has asked for the worker.
        self._watch(connection, partial(self._kill, pid, connection))
        with contextlib.suppress(OSError):  # the program has ended, so `_kill` follows
            connection.sendall(STARTED)
        return False

    def _kill(self, pid: int, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)

    def _report_end(self, pid: int, process: int, connection: socket.socket) -> None:
        _, status = os.waitpid(pid, 0)
        self._num_workers -= 1
        self._selector.unregister(process)
        os.close(process)
        with contextlib.suppress(KeyError):  # `_kill` has unregistered the connection
            self._selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d" % os.waitstatus_to_exitcode(status))
        connection.close()

    def _close(self) -> None:
        """Close the server's files in a fork."""
        for key in list(self._selector.get_map().values()):
            # An open object would later close another file that has got its number.
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.fileobj is not sys.stdin:
                os.close(key.fd)
        self._selector.close()


def _read_at_import(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}


def _import_ray(environment: dict[str, str]) -> None:
    # Workers of any job are forked. Ray gives each of them its job with its first task.
    os.environ |= {name: value for name, value in environment.items() if name.startswith("RAY_")} | NO_JOB
    from steadfast.orchestration.internals import other_class_ids

    with other_class_ids():
        _import(RAY_AND_STEADFAST)
    # Objects from before the fork are in no generation of a worker, so that its garbage collector does not copy them.
    gc.collect()
    gc.freeze()


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        import_module(name)


def _forks_are_sound() -> bool:
    """Return whether no import has done what does not survive a fork.

    An initialized CUDA cannot be used in a fork, and a generator of random numbers gives the same numbers in each fork.
    """
    return len({_report_of_fork() for _ in range(2)}) == 2


def _report_of_fork() -> bytes:
    """Return a random id that a fork has drawn, or nothing if the fork cannot use its GPU."""
    from steadfast.orchestration.internals import random_id

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch = sys.modules["torch"]
        os.write(writer, b"" if torch.cuda._is_in_bad_fork() else random_id())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        report = file.read()
    os.waitpid(pid, 0)
    return report


def _run_worker(request: dict[str, Any]) -> None:
    """Run a worker's script here, with the settings of the program that asked for the worker."""
    for number, stream in enumerate(request[STREAMS]):
        os.dup2(stream, number)
        os.close(stream)
    os.setpgid(0, 0)  # at the end of a worker, the raylet ends all processes of the worker's group
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    resource.setrlimit(resource.RLIMIT_NOFILE, request["open_files"])
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the generators of torch and Python differ in each process already
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Import what workers need, then fork a worker for each request."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    environment = dict(os.environ)
    descriptor, num_threads, *raylets = sys.argv[1:]
    # Ray sets this variable in a worker, but only after the libraries that read it have been imported.
    os.environ.setdefault("OMP_NUM_THREADS", num_threads)
    _import(LIBRARIES)
    raylet = int(raylets[0]) if raylets else None
    _run_worker(_Server(socket.socket(fileno=int(descriptor)), environment, raylet).serve())
