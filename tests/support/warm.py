"""Commands as forks of one process that has imported what they need, so that a start costs no imports.

A fork has the environment, streams, session and working directory of a command of its own, and runs `main.py` from its
first line. So is the server from which an embedded Ray of the command forks its workers. A command whose environment
differs in a variable that libraries read at import starts as a new process.
`tests/cluster/test_kill.py` keeps a command that starts without this server, so that a broken import shows.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from steadfast.orchestration import fork_server
from steadfast.orchestration.fork_worker import RAYLET_VARIABLE

ROOT = Path(__file__).parents[2]
_READ_AT_IMPORT = (
    *("GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "RAY_", "TORCH"),
)
_MODULES = (
    "steadfast.cli",
    "steadfast.commands.train",
    "steadfast.launch.ray",
    "steadfast.launch.torchrun",
    "steadfast.orchestration.cluster",
    "steadfast.orchestration.trainer",
    "steadfast.worker",
    "steadfast.analysis.report.write",
    *fork_server.LIBRARIES,
    *fork_server.RAY_AND_STEADFAST,
)
_KILLED = -signal.SIGKILL


class Warm:
    """The process from which commands are forked. It ends with this one."""

    def __init__(self) -> None:
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env={**self._environment, "PYTHONPATH": f"{ROOT / 'app'}{os.pathsep}{ROOT}"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._line = ours

    def start(self, words: Sequence[str], environment: Mapping[str, str], output: int) -> Forked | None:
        """Start `python WORDS` with its output in a file, or return None if a fork cannot have this environment."""
        if _imported(environment) != _imported(self._environment):
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            request = json.dumps({"words": list(words), "environment": dict(environment)}).encode()
            socket.send_fds(self._line, [request], [output, theirs.fileno()])
        return Forked(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        self._server.kill()
        self._server.wait()


class Forked:
    """A command that the server has forked, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._text = line.makefile("r")
        self.pid = int(self._text.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
            self.returncode = int(self._text.readline() or _KILLED)
            self._text.close()
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _imported(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_IMPORT)}


class _Server:
    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._forks: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, line to the test

    def serve(self) -> None:
        """Fork a command for each request, and report its end."""
        while True:
            ready, _, _ = select.select([self._line.fileno(), *self._forks], [], [])
            for descriptor in ready:
                if descriptor == self._line.fileno():
                    self._fork()
                else:
                    self._report_end(descriptor)

    def _fork(self) -> None:
        data, files, _, _ = socket.recv_fds(self._line, 2**20, 2)
        if not data:
            os._exit(0)
        output, told = files
        pid = os.fork()
        if pid == 0:
            self._close(told)
            _run(json.loads(data), output)
        os.close(output)
        answer = socket.socket(fileno=told)
        answer.sendall(b"%d\n" % pid)
        self._forks[os.pidfd_open(pid)] = pid, answer

    def _close(self, told: int) -> None:
        """Close the server's files in a fork."""
        self._line.close()
        os.close(told)
        for descriptor, (_, line) in self._forks.items():
            os.close(descriptor)
            line.close()

    def _report_end(self, descriptor: int) -> None:
        pid, answer = self._forks.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # the test has ended
            answer.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
        answer.close()


def _run(request: dict[str, Any], output: int) -> None:
    """Run the command in this process. Never returns."""
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.clear()
        os.environ.update(request["environment"])
        _fork_the_next_fork_server()
        sys.argv = list(request["words"])
        sys.orig_argv = [sys.executable, *sys.argv]
        sys.path[:] = [str(ROOT), *(path for path in sys.path if path not in ("", str(ROOT)))]
        sys.modules["numpy"].random.seed()  # the generators of torch and Python differ in each process already
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _fork_the_next_fork_server() -> None:
    """Fork a process that becomes the fork server which this command starts, or ends with the command."""
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        line.close()
        _become_fork_server(theirs)
    theirs.close()
    started = partial(_ForkServer, pid, line)
    fork_server.subprocess = SimpleNamespace(  # type: ignore[assignment, attr-defined]
        Popen=started, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )


class _ForkServer:
    """The process of a fork server, with the methods of `subprocess.Popen` that the command uses."""

    def __init__(self, pid: int, line: socket.socket, command: list[str], **options: Any) -> None:
        self.pid = pid
        self._line = line
        (listener,) = options["pass_fds"]
        output = os.open(os.devnull, os.O_WRONLY) if options["stdout"] is not None else os.dup(1)
        # Of the command all but Python, its program and the number that the listener has in this process.
        request = {"words": command[4:], "environment": dict(os.environ), "folder": options["cwd"]}
        socket.send_fds(line, [json.dumps(request).encode()], [listener, output])
        os.close(output)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        os.waitpid(self.pid, 0)


def _become_fork_server(line: socket.socket) -> None:
    """Run the program of a fork server, whose standard input ends with the command. Never returns."""
    data, files, _, _ = socket.recv_fds(line, 2**20, 2)
    if not data:  # the command has ended, and has started no server
        os._exit(0)
    request = json.loads(data)
    listener, output = files
    code = 1
    try:
        for number, descriptor in ((0, line.fileno()), (1, output), (2, output)):
            os.dup2(descriptor, number)
        line.close()
        os.close(output)
        sys.argv = ["-c", str(listener), *request["words"]]
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.path[:] = [str(ROOT / "app"), *(path for path in sys.path if path not in ("", str(ROOT)))]
        fork_server._import_ray = partial(_import_ray, fork_server._import_ray)
        fork_server._run_worker = partial(_run_worker, fork_server._run_worker)
        fork_server.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _import_ray(stock: Callable[[dict[str, str]], None], environment: dict[str, str]) -> None:
    stock(environment)
    # Ray, which has been imported already, reads its variables in the environment again.
    sys.modules["ray._raylet"].Config.initialize("")


def _run_worker(stock: Callable[[dict[str, Any]], None], request: dict[str, Any]) -> None:
    # Ray, which took this process for the raylet when it was imported, would not end the worker with its own raylet.
    raylet = os.pidfd_open(int(request["environment"][RAYLET_VARIABLE]))
    threading.Thread(target=lambda: (select.select([raylet], [], []), os._exit(1)), daemon=True).start()
    stock(request)


def _leave(code: int) -> None:
    """End this process in the order of the interpreter: threads, registered functions, streams."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    # Ray reads these variables when it is imported, and uses them in workers alone.
    os.environ |= fork_server.NO_JOB | {RAYLET_VARIABLE: str(os.getpid())}
    from steadfast.orchestration.internals import other_class_ids

    with other_class_ids():
        for name in _MODULES:
            import_module(name)
    sys.modules["torch"].set_num_threads(1)
    # Objects from before the fork are in no generation of a fork, so that its garbage collector does not copy them.
    gc.collect()
    gc.freeze()
    _Server(line).serve()


if __name__ == "__main__":
    main()
