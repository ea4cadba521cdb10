"""Ctrl-C and SIGTERM: once means finish the step, checkpoint and stop; twice means stop now."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

EXIT_STOPPED = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ABORT_S = 3.0
_SAME_S = 0.5  # a terminal and a launcher may both deliver one Ctrl-C


class Interrupts:
    """While entered, the process's SIGINT and SIGTERM call `on_stop` instead; the second calls `on_abort`, which has
    three seconds, and ends the process."""

    def __init__(self, on_stop: Callable[[], None] = lambda: None, on_abort: Callable[[], None] = lambda: None) -> None:
        self.on_stop, self.on_abort = on_stop, on_abort
        self._first = 0.0

    @property
    def stopping(self) -> bool:
        return self._first > 0

    def check(self) -> None:
        """For code that has nothing to finish: KeyboardInterrupt, which may not be raised just anywhere (a callback of
        Ray's swallows it), if a stop has been asked for."""
        if self.stopping:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupts:
        self._former = {each: signal.getsignal(each) for each in _SIGNALS}
        self.install()
        return self

    def install(self) -> None:
        """Again, after something has put handlers of its own in place."""
        for each in _SIGNALS:
            signal.signal(each, self._handle)

    def __exit__(self, *_: object) -> None:
        for each, handler in self._former.items():
            signal.signal(each, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._first:
            self._first = now
            self.on_stop()
        elif now - self._first > _SAME_S:
            sys.stderr.write("stopped at once; the last checkpoint holds\n")
            # Not sys.exit: a collective or an RPC may hold the interpreter for as long as its peer is silent.
            threading.Timer(_ABORT_S, os._exit, (EXIT_STOPPED,)).start()
            self.on_abort()
            os._exit(EXIT_STOPPED)
