"""Causes of workers that Ray cannot start, or that end before they join."""

import contextlib
import os
import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import ray._private.state
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from steadfast.guards.failures import FailureKind
from steadfast.orchestration.messages import FailureReport

_LATE_S = 3.0  # time after which the cause is looked for why a worker has not started
_ERROR = re.compile(r"error|exception|no such|not found|no module|denied|cannot|fail|killed|unable", re.IGNORECASE)
_WORKER_COMMAND = "--python_worker_command="  # of a raylet
_COLOR = re.compile(r"\x1b\[\d+m")
_ENDED = "its process has ended: it was killed, perhaps because memory ran out, or has crashed"


class NotStarted(RayError):
    """Raised when a worker's process has ended before Ray has seen the process.

    `was_killed` says that the same program may run another time.
    """

    def __init__(self, message: str, was_killed: bool) -> None:
        super().__init__(message)
        self.was_killed = was_killed


def await_start(actor: Any) -> Any:
    """Return the metadata of a worker's actor, once there is room and the worker has started.

    Raises:
        NotStarted: the worker's program cannot run. Ray itself tries again for minutes, without an error.
    """
    since_s = time.time()
    answer = actor.get_metadata.remote()
    while not ray.wait([answer], timeout=_LATE_S)[0]:
        if fault := _fault_on(node_of(actor), since_s):
            raise fault
    return ray.get(answer)


def _fault_on(node: str, since_s: float) -> NotStarted | None:
    """Return why workers do not start on a node of this machine since `since_s`."""
    for raylet in psutil.process_iter(["cmdline"]):
        words = raylet.info["cmdline"] or ()
        if f"--node_id={node}" not in words:
            continue
        with contextlib.suppress(OSError, psutil.Error):
            # Until Ray redirects its output, a worker writes to the file of its raylet.
            file = Path(f"/proc/{raylet.pid}/fd/2").resolve()
            if file.stat().st_mtime >= since_s and (line := _last_error(file.read_text(errors="replace"))):
                return NotStarted(f"its program cannot run: {line}", was_killed=False)
            if not any(child.create_time() >= since_s for child in raylet.children()):
                (command,) = (word for word in words if word.startswith(_WORKER_COMMAND))
                return _fault_of(shlex.split(command.removeprefix(_WORKER_COMMAND)), raylet.environ())
    return None


def _last_error(text: str) -> str:
    """Return the last line if it is an error that a worker has written."""
    # Lines of the raylet itself begin with a bracket.
    lines = [line for line in text.splitlines() if line and line[0] != "["]
    return lines[-1] if lines and _ERROR.search(lines[-1]) else ""


def _fault_of(command: list[str], environment: dict[str, str]) -> NotStarted | None:
    """Return why a node's Python ends without a word."""
    python, *words = command
    # With the code of the run, which Ray adds to the path of a worker.
    paths = environment.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")
    environment = environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with contextlib.suppress(subprocess.TimeoutExpired):
        try:
            # It runs nothing, but has the words of a worker, because a wrapper may look at them.
            ended = subprocess.run([python, "-c", "", *words], env=environment, capture_output=True, timeout=_LATE_S)
        except OSError as error:
            return NotStarted(f"its program cannot run: {python}: {error.strerror}", was_killed=False)
        if ended.returncode < 0:
            what = f"its program {python} was killed by signal {-ended.returncode}, perhaps because memory ran out"
            return NotStarted(what, was_killed=True)
        if ended.returncode:
            what = f"its program cannot run: {python} has ended with exit code {ended.returncode}"
            return NotStarted(what, was_killed=False)
    return None


def failure_to_start(error: RayError) -> FailureReport:
    """Return the report of a worker that has ended without one."""
    text = _COLOR.sub("", str(error)).strip()
    lines = text.splitlines() or [type(error).__name__]
    kind, message, trace = FailureKind.WORKER, lines[0], ""
    if isinstance(error, RayTaskError) or "in its creation task" in lines[0]:
        kind, message, trace = FailureKind.EXCEPTION, lines[-1], text
    elif isinstance(error, OutOfMemoryError):
        kind = FailureKind.OUT_OF_MEMORY
    elif isinstance(error, NotStarted) and not error.was_killed:
        kind = FailureKind.OURS  # the program would fail again, so the run ends if it fails on every node
    elif "Worker exit detail" in text:
        message = _ENDED
    return FailureReport(kind, 0, 0, message, trace)


def node_of(actor: Any) -> str:
    """Return the id of the node on which Ray starts an actor, or "" if there is none."""
    with contextlib.suppress(Exception):
        return str(dict(ray._private.state.actors(actor._actor_id.hex()))["Address"]["NodeID"])
    return ""
