"""Program that an embedded raylet starts for each worker, instead of Ray's `setup_worker.py`.

The program asks the fork server for a process that has imported everything a worker needs. If there is none, or if its
environment differs, Ray's own program starts the worker as usual. Imports are few, because each worker waits for them.
"""

import json
import os
import resource
import signal
import socket
import sys
from typing import Any

ADDRESS_VARIABLE = "STEADFAST_FORK_SERVER"  # the server's abstract Unix socket
STARTED = b"+"  # the server's answer, before it sends the exit code at the worker's end
STREAMS = "streams"  # key of a received request: descriptors of the standard streams
_CONTEXT_OPTION, _LANGUAGE_OPTION = "--serialized-runtime-env-context=", "--language="
_SIZE_BYTES = 8
_ANSWER_S = 120.0  # time for the imports of the server on a busy machine


def _request(arguments: list[str]) -> dict[str, Any] | None:
    """Return the request for the fork server, or None if only Ray's program can start this worker.

    Args:
        arguments: those of Ray's `setup_worker.py`: the worker's script, options of the worker, and two of Ray's own.
    """
    context: dict[str, Any] = {}
    language, passed = "", []
    for argument in arguments:
        if argument.startswith(_CONTEXT_OPTION):
            context = json.loads(argument.removeprefix(_CONTEXT_OPTION) or "{}")
        elif argument.startswith(_LANGUAGE_OPTION):
            language = argument.removeprefix(_LANGUAGE_OPTION)
        else:
            passed.append(argument)
    variables: dict[str, str] = context.pop("env_vars", {})
    own_python = context.pop("py_executable", sys.executable) == sys.executable
    # Ray replaces ${NAME} in variables. All other keys of a context start another program.
    expanded = any("$" in value for value in variables.values())
    if language != "PYTHON" or not own_python or expanded or any(context.values()):
        return None
    return {
        "argv": passed,
        "environment": dict(os.environ) | variables,
        "folder": os.getcwd(),
        "blocked_signals": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


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
    """
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_ANSWER_S)
        try:
            server.connect("\0" + address)
            socket.send_fds(server, [len(text).to_bytes(_SIZE_BYTES)], [0, 1, 2])
            server.sendall(text)
            if server.recv(len(STARTED)) != STARTED:
                return None
        except OSError:
            return None
        # Until the worker registers, the raylet takes this process for the worker.
        server.settimeout(None)
        return int(server.recv(16) or b"1")


def main() -> int:
    """Start a worker, and wait for its end."""
    request = _request(sys.argv[1:])
    if request is not None:
        exit_code = _ask(os.environ[ADDRESS_VARIABLE], request)
        if exit_code is not None:
            return exit_code
    stock = os.path.join(os.path.dirname(sys.argv[1]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, stock, *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
