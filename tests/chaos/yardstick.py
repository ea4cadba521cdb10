"""How much slower than alone this machine is at the moment: what an absolute limit has to be stretched by."""

import hashlib
import threading
import time
from typing import Self

_EVERY_S = 1.35
# Of processor time. Who wants a little now and then is served at once, on the busiest machine; who has to start a
# process wants much.
_BURST_S = 0.15
_WORK = bytes(2**20)  # to be hashed again and again, while the interpreter is free
_MOST = 10.0  # beyond it a figure says nothing


class Yardstick:
    """A fixed piece of work, done again and again: the seconds that it takes for one of processor time."""

    def __init__(self) -> None:
        self._takes: list[tuple[float, float, float]] = []  # Unix time at its end, seconds, processor seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="yardstick")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def slowdown(self, since_s: float, until_s: float) -> float:
        """Return the factor between two Unix times; 1 for a machine that has nothing else to do."""
        taken_s = worked_s = 0.0
        for ended_s, seconds, processor_s in list(self._takes):
            if since_s - _EVERY_S <= ended_s <= until_s + _EVERY_S:
                taken_s += seconds
                worked_s += processor_s
        return min(max(taken_s / worked_s, 1.0), _MOST) if worked_s else 1.0

    def _work(self) -> None:
        while not self._closing.is_set():
            began_s = time.perf_counter()
            processor_s = time.thread_time()
            worked_s = 0.0
            while worked_s < _BURST_S:
                hashlib.sha256(_WORK).digest()
                worked_s = time.thread_time() - processor_s
            self._takes.append((time.time(), max(time.perf_counter() - began_s, worked_s), worked_s))
            self._closing.wait(_EVERY_S)
