"""A thread for a tracker, so that the training thread waits for nothing that it does."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_log = logging.getLogger(__name__)


class Background:
    """Does work in the order in which it comes. After an error it does no more, and has warned once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._failed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name.lower())  # one thread keeps the order

    def submit(self, work: Callable[[], object]) -> None:
        """Have the work done, and return at once."""

        def attempt() -> None:
            try:
                if not self._failed:
                    work()
            except Exception as error:
                self._failed = True
                _log.warning("%s is off until the next attempt, training goes on: %s", self._name, error)

        self._thread.submit(attempt)

    def close(self) -> None:
        """Return once all of the work is done."""
        self._thread.shutdown()
