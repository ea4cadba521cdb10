"""Where figures are kept: TensorBoard, and a twin in memory for tests."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from app.config.schema import TensorBoardConfig
from app.storage import LocalStore, Store

_log = logging.getLogger(__name__)
_FOLDER = "tensorboard"
_BRING_EVERY_S = 20.0
_SPEED = {"step_ms", "units_per_s", "samples_per_s", "mfu", "memory_bytes", "world_size"}
_NOT_FIGURES = {"event", "time_s", "attempt", "step", "total_steps", "eta_s", "unit"}


class Tracker(Protocol):
    """Calls return at once and never raise: a tracker that fails costs its own figures, not the run."""

    def scalars(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class MemoryTracker:
    """The twin: `values[name][step]`."""

    def __init__(self) -> None:
        self.values: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self.closed = False

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.values[name][step] = value

    def close(self) -> None:
        self.closed = True


class TensorBoardTracker:
    """Writes on a thread of its own, which also pays for the import: the first step waits for neither.

    What an earlier attempt drew at `first_step` and beyond is purged, so steps done again are drawn once. To a bucket
    it goes by way of a folder of this machine.
    """

    def __init__(self, store: Store, first_step: int) -> None:
        self._failed, self._store, self._brought_s = False, store, time.monotonic()
        self._spool = None if isinstance(store, LocalStore) else TemporaryDirectory(prefix=_FOLDER)
        directory = Path(self._spool.name) if self._spool else Path(store.uri) / _FOLDER
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensorboard")  # one thread keeps the order

        def open_writer() -> None:
            from torch.utils.tensorboard.writer import SummaryWriter

            # Seconds, not the default two minutes: this is what a killed leader loses.
            self._writer = SummaryWriter(str(directory), purge_step=first_step, flush_secs=5)

        self._thread.submit(self._attempt, open_writer)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        def write() -> None:
            # One event for all of them: add_scalar's event for each costs five times the CPU, next to the training.
            figures = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._writer.file_writer.add_summary(Summary(value=figures), step)
            if time.monotonic() - self._brought_s > _BRING_EVERY_S:
                self._bring()

        from tensorboard.compat.proto.summary_pb2 import Summary

        self._thread.submit(self._attempt, write)

    def close(self) -> None:
        def end() -> None:
            self._writer.close()
            self._bring()
            if self._spool:
                self._spool.cleanup()

        self._thread.submit(self._attempt, end)
        self._thread.shutdown()

    def _bring(self) -> None:
        self._brought_s = time.monotonic()
        if self._spool:
            self._writer.flush()
            for path in Path(self._spool.name).iterdir():
                self._store.commit(f"{_FOLDER}/{path.name}", path.read_bytes())

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            if not self._failed:
                work()
        except Exception as error:
            self._failed = True
            _log.warning("TensorBoard is off until the next attempt, training goes on: %s", error)


class Trackers:
    """All trackers of an attempt; none is fine."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def record(self, event: Mapping[str, Any]) -> None:
        """Keep a `log` or `validation` event as `train/…`, `speed/…` and `validation/…`."""
        group = "train" if event["event"] == "log" else "validation"
        figures = {
            f"{'speed' if key in _SPEED else group}/{key}": value
            for key, value in event.items()
            if key not in _NOT_FIGURES and value is not None
        }
        for tracker in self._trackers:
            tracker.scalars(event["step"], figures)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def build_trackers(configs: Sequence[TensorBoardConfig], store: Store, first_step: int) -> Trackers:
    """One attempt's trackers, each in its folder of the run directory; it begins with `first_step`."""
    return Trackers([TensorBoardTracker(store, first_step) for _ in configs])
