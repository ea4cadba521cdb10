"""Show on the command's console what user code prints in a Ray worker, and explain `breakpoint()`."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, cast

_EVERY_S = 0.2  # least time between two messages
_MOST_LINES = 50  # of one message

Send = Callable[[list[str]], None]


@contextmanager
def shown_output(send: Send) -> Iterator[None]:
    """Send the lines that Python code in this context writes to stdout and stderr.

    Ray's log still receives the lines. Output of C++ libraries, which write past Python, only goes there.
    """
    lines = _Lines(send)
    former = sys.breakpointhook
    # Variables of Ray's own debuggers are set by users who know them.
    if "RAY_DEBUG" not in os.environ:
        sys.breakpointhook = _Breakpoints()
    try:
        stdout, stderr = (cast("IO[str]", _Tee(stream, lines)) for stream in (sys.stdout, sys.stderr))
        with redirect_stdout(stdout), redirect_stderr(stderr):
            yield
    finally:
        sys.breakpointhook = former
        lines.close()


class _Lines:
    """Lines that a thread sends, several at a time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._there = threading.Event()  # set if lines are there, or none will follow
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="user output")
        self._thread.start()

    def add(self, lines: list[str]) -> None:
        with self._lock:
            self._lines += lines
        self._there.set()

    def close(self) -> None:
        """Send the rest."""
        self._over.set()
        self._there.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            self._there.wait()
            self._send_all()
            # Code that prints all the time must not keep the coordinator busy.
            self._over.wait(_EVERY_S)
        self._send_all()

    def _send_all(self) -> None:
        self._there.clear()
        with self._lock:
            lines, self._lines = self._lines, []
        if len(lines) > _MOST_LINES:
            left_out = len(lines) - _MOST_LINES
            lines = [*lines[:_MOST_LINES], f"... {left_out} lines left out, which Ray's log of this worker has"]
        if lines:
            self._send(lines)


class _Tee:
    """Stream that passes everything on, and hands over whole lines."""

    def __init__(self, stream: IO[str], lines: _Lines) -> None:
        self._stream = stream
        self._lines = lines
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._unfinished = ""

    def write(self, text: str) -> int:
        written = self._stream.write(text)
        # A forked process has no thread that would send its lines.
        if os.getpid() == self._pid:
            with self._lock:
                *whole, self._unfinished = (self._unfinished + text).split("\n")
            if whole:
                # A progress bar returns to the beginning of its line; only its last state is shown.
                self._lines.add([line.rstrip("\r").rpartition("\r")[2] for line in whole])
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Breakpoints:
    """Hook of `breakpoint()` that says once for each place how to debug."""

    def __init__(self) -> None:
        self._places: set[tuple[str, int]] = set()

    def __call__(self, *_: Any, **__: Any) -> None:
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_lineno
        if place in self._places:
            return
        self._places.add(place)
        print(
            f"{place[0]}:{place[1]}: breakpoint() does not stop here, because a worker of Ray has no terminal. Give "
            "the same command by torchrun --nproc-per-node 1, or call fit: there it does"
        )
