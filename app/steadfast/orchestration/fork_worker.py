"""Program that asks a fork server for a worker, which has imported everything already.

An embedded raylet starts this program instead of Ray's `setup_worker.py`, and the command has started the fork server.
On a cluster, `setup_worker.py` starts this program instead of Python, and the first worker of a node starts the server.
If there is no server, or if its environment differs, the worker starts as usual. Imports are few, because each worker
waits for them.
"""

import contextlib
import hashlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

ADDRESS_VARIABLE = "STEADFAST_FORK_SERVER"  # abstract Unix socket of the server of an embedded Ray
RAYLET_VARIABLE = "RAY_RAYLET_PID"
STARTED = b"+"  # the server's answer, before it sends the exit code at the worker's end
STREAMS = "streams"  # key of a received request: descriptors of the standard streams
THREADS_OPTION = "--num-threads="  # of a worker of a cluster
# The Python of a node's raylet, which is the parent of the shell that runs these words.
_RAYLETS_PYTHON = r"tr '\0' '\n' < /proc/$PPID/cmdline | sed -n 's/^--python_worker_command=\([^ ]*\).*/\1/p'"
VERSION = "{}.{}".format(*sys.version_info)
_CONTEXT_OPTION, _LANGUAGE_OPTION = "--serialized-runtime-env-context=", "--language="
_SIZE_BYTES = 8
_ANSWER_S = 120.0  # time for the imports of the server on a busy machine


def python_of_cluster(num_threads: int) -> str:
    """Return the `py_executable` of a runtime environment whose workers are forks.

    Args:
        num_threads: number of threads for a worker's operations on the CPU.
    """
    # With -P no module of the user's working directory takes the place of one of Python's.
    return f"$({_RAYLETS_PYTHON}) -P -m {__name__} {THREADS_OPTION}{num_threads} {VERSION}"


def _context_of(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the arguments of `setup_worker.py` into the context of a runtime environment and the worker's arguments."""
    context: dict[str, Any] = {}
    rest = []
    for argument in arguments:
        if argument.startswith(_CONTEXT_OPTION):
            context |= json.loads(argument.removeprefix(_CONTEXT_OPTION) or "{}")
        elif argument.startswith(_LANGUAGE_OPTION):
            context["language"] = argument.removeprefix(_LANGUAGE_OPTION)
        else:
            rest.append(argument)
    return context, rest


def _variables_of(context: dict[str, Any]) -> dict[str, str] | None:
    """Return the variables that a context sets, or None if the context starts another program than this Python."""
    variables: dict[str, str] = context.pop("env_vars", {})
    own_python = context.pop("py_executable", sys.executable) == sys.executable
    # Ray replaces ${NAME} in variables.
    expanded = any("$" in value for value in variables.values())
    if context.pop("language", "") != "PYTHON" or not own_python or expanded or any(context.values()):
        return None
    return variables


def _request(arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    return {
        "argv": arguments,
        "environment": dict(os.environ) | variables,
        "folder": os.getcwd(),
        "blocked_signals": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


def user_of(connection: socket.socket) -> int:
    """Return the id of the user whose process is connected."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", peer)
    return int(user)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Return a request that `_ask` has sent, with the descriptors of `STREAMS`.

    Raises OSError or ValueError if the other side ends early.
    """
    size, streams, _, _ = socket.recv_fds(connection, _SIZE_BYTES, 3)
    with connection.makefile("rb") as file:
        request: dict[str, Any] = json.loads(file.read(int.from_bytes(size)))
    return request | {STREAMS: streams}


def _ask(address: str, request: dict[str, Any]) -> int | None:
    """Have the fork server start a worker, and return the exit code of that worker.

    Return None if the server does not start it.

    Raises:
        ConnectionRefusedError: there is no server.
    """
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_ANSWER_S)
        server.connect("\0" + address)
        if user_of(server) != os.getuid():  # any user may take the name, but may not read this user's variables
            return None
        try:
            socket.send_fds(server, [len(text).to_bytes(_SIZE_BYTES)], [0, 1, 2])
            server.sendall(text)
            if server.recv(len(STARTED)) != STARTED:
                return None
        except OSError:
            return None
        # Until the worker registers, the raylet takes this process for the worker.
        server.settimeout(None)
        return int(server.recv(16) or b"1")


def _start_embedded(arguments: list[str]) -> int:
    """Start a worker of an embedded Ray from the arguments of `setup_worker.py`, and wait for its end."""
    context, rest = _context_of(arguments)
    variables = _variables_of(context)
    if variables is not None:
        with contextlib.suppress(ConnectionRefusedError):
            exit_code = _ask(os.environ[ADDRESS_VARIABLE], _request(rest, variables))
            if exit_code is not None:
                return exit_code
    stock = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, stock, *arguments])


def _start_on_cluster(num_threads: int, arguments: list[str]) -> int:
    """Start a worker from the arguments of `python_of_cluster` and Python, and wait for its end."""
    version, *arguments = arguments
    if version != VERSION:  # functions that the command has pickled would crash
        sys.exit(f"error: {sys.executable} is Python {VERSION}, and the command has Python {version}")
    # A server serves the workers of one raylet and one version of the code.
    versions = f"{sys.executable} {os.environ.get('PYTHONPATH')} {num_threads}"
    address = f"steadfast-{os.environ[RAYLET_VARIABLE]}-{hashlib.sha256(versions.encode()).hexdigest()[:16]}"
    request = _request(arguments, {})
    try:
        exit_code = _ask(address, request)
    except ConnectionRefusedError:
        from steadfast.orchestration.fork_server import ForkServer

        with contextlib.suppress(OSError):  # another worker has started the server meanwhile
            ForkServer(num_threads, address, int(os.environ[RAYLET_VARIABLE]))
        try:
            exit_code = _ask(address, request)
        except ConnectionRefusedError:
            exit_code = None
    if exit_code is not None:
        return exit_code
    os.execv(sys.executable, [sys.executable, *arguments])


def main() -> int:
    """Start a worker, and wait for its end."""
    first, *rest = sys.argv[1:]
    if first.startswith(THREADS_OPTION):
        return _start_on_cluster(int(first.removeprefix(THREADS_OPTION)), rest)
    return _start_embedded([first, *rest])


if __name__ == "__main__":
    raise SystemExit(main())
