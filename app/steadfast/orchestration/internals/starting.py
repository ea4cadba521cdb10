"""Causes of workers that Ray cannot start, or that end before they join."""

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import psutil
import ray._private.state
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from steadfast.guards.failures import FailureKind
from steadfast.orchestration.messages import FailureReport

_LATE_S = 6.0  # time after which a worker that has not started is looked for in the raylet's output
_ERROR = re.compile(r"error|exception|no such|not found|no module|denied|cannot|fail|killed|unable", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[\d+m")
_ENDED = "its process has ended: it was killed, perhaps because memory ran out, or has crashed"


class NotStarted(RayError):
    """Raised when a worker's process has ended before Ray has seen the process."""


def await_start(actor: Any) -> Any:
    """Return the metadata of a worker's actor, once there is room and the worker has started.

    Raises:
        NotStarted: the worker's program cannot run. Ray itself tries again for minutes, without an error.
    """
    since_s = time.time()
    answer = actor.get_metadata.remote()
    while not ray.wait([answer], timeout=_LATE_S)[0]:
        if line := _last_error(node_of(actor), since_s):
            raise NotStarted(f"its program cannot run: {line}")
    return ray.get(answer)


def _last_error(node: str, since_s: float) -> str:
    """Return the last line that a worker has written since `since_s` on a node of this machine, if it is an error."""
    # Until Ray redirects its output, a worker writes to the file of its raylet.
    for process in psutil.process_iter(["cmdline"]):
        if f"--node_id={node}" not in (process.info["cmdline"] or ()):
            continue
        with contextlib.suppress(OSError):
            file = Path(f"/proc/{process.pid}/fd/2").resolve()
            if file.stat().st_mtime >= since_s:
                # Lines of the raylet itself begin with a bracket.
                lines = [line for line in file.read_text(errors="replace").splitlines() if line and line[0] != "["]
                if lines and _ERROR.search(lines[-1]):
                    return lines[-1]
    return ""


def failure_to_start(error: RayError) -> FailureReport:
    """Return the report of a worker that has ended without one."""
    text = _COLOR.sub("", str(error)).strip()
    lines = text.splitlines() or [type(error).__name__]
    kind, message, trace = FailureKind.WORKER, lines[0], ""
    if isinstance(error, RayTaskError) or "in its creation task" in lines[0]:
        kind, message, trace = FailureKind.EXCEPTION, lines[-1], text
    elif isinstance(error, OutOfMemoryError):
        kind = FailureKind.OUT_OF_MEMORY
    elif "Worker exit detail" in text:
        message = _ENDED
    return FailureReport(kind, 0, 0, message, trace)


def node_of(actor: Any) -> str:
    """Return the id of the node on which Ray starts an actor, or "" if there is none."""
    with contextlib.suppress(Exception):
        return str(dict(ray._private.state.actors(actor._actor_id.hex()))["Address"]["NodeID"])
    return ""
