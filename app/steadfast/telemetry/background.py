"""Background thread that keeps a slow or hanging tracker off the training thread."""

import logging
import math
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

_log = logging.getLogger(__name__)

_LIMIT_S = 100.0  # longer than W&B's own time limit of 90 s


class Background:
    """Single daemon thread that makes calls in their order.

    The first exception or late call is logged as a warning. The thread skips all calls after it, except the last one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_off = False
        self._waiting_since_s = math.inf  # the call under way
        self._calls: SimpleQueue[tuple[float, Callable[[], object]] | None] = SimpleQueue()
        self._last: Callable[[], object] | None = None
        # A daemon, because Python waits for all other threads before a process ends.
        self._thread = Thread(target=self._run, name=name.lower(), daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        """Queue the call and return at once."""
        if not self._is_off and not self._is_late():
            self._calls.put((time.monotonic(), call))

    def close(self, last: Callable[[], object]) -> None:
        """Make the last call, even after an error.

        Return when the call has been made or is late.
        """
        self._last = last
        self._calls.put(None)
        # A call that is late has used up the time in which the thread could end.
        if not self._is_late():
            self._thread.join(_LIMIT_S)
        if self._thread.is_alive():
            self._turn_off(f"it has not closed within {_LIMIT_S:.0f} s, and its last figures may be missing")

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            submitted_s, call = item
            if not self._is_off:
                self._make(call, submitted_s)
        if self._last is not None:
            self._make(self._last, time.monotonic())

    def _make(self, call: Callable[[], object], submitted_s: float) -> None:
        # The time counts from the submission, so that calls in a queue that only grows are late too.
        self._waiting_since_s = submitted_s
        try:
            call()
        except BaseException as error:  # SystemExit too: otherwise this thread would end without a warning
            self._turn_off(f"{type(error).__name__}: {error}")
        finally:
            self._waiting_since_s = math.inf

    def _is_late(self) -> bool:
        """Return whether a call is late; turn the tracker off if so."""
        late = time.monotonic() - self._waiting_since_s > _LIMIT_S
        if late:
            self._turn_off(f"a call has not returned for {_LIMIT_S:.0f} s")
        return late

    def _turn_off(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            _log.warning("%s is off until the next attempt, training goes on: %s", self._name, reason)
