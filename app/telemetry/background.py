"""Background thread that keeps slow trackers off the training thread."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_log = logging.getLogger(__name__)


class Background:
    """Single thread that runs submitted work in order.

    The first exception is logged as a warning, and the thread skips all work after it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name.lower())  # one thread keeps the order

    def submit(self, work: Callable[[], object]) -> None:
        """Queue the work and return at once."""

        def attempt() -> None:
            try:
                if not self._failed:
                    work()
            except Exception as error:
                self._failed = True
                _log.warning("%s is off until the next attempt, training goes on: %s", self._name, error)

        self._thread.submit(attempt)

    def close(self) -> None:
        """Wait for all queued work, then stop the thread."""
        self._thread.shutdown()
