"""Figures for TensorBoard."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from app.storage import LocalStore, Store

_log = logging.getLogger(__name__)
_FOLDER = "tensorboard"
_FLUSH_S = 5  # not the default two minutes: this is what a killed leader loses
_UPLOAD_EVERY_S = 20.0


class TensorBoardTracker:
    """Writes TensorBoard's event files, on a thread of its own."""

    def __init__(self, store: Store, first_step: int) -> None:
        self._failed = False
        self._store = store
        self._uploaded_s = time.monotonic()
        # TensorBoard's writer knows no buckets: to one, files go by way of a folder of this machine.
        self._spool: TemporaryDirectory[str] | None = None
        directory = Path(store.uri) / _FOLDER
        if not isinstance(store, LocalStore):
            self._spool = TemporaryDirectory(prefix=_FOLDER)
            directory = Path(self._spool.name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensorboard")  # one thread keeps the order

        def open_writer() -> None:
            # Over a second, which the thread pays and the first step does not wait for.
            from torch.utils.tensorboard.writer import SummaryWriter

            # What an earlier attempt drew at `first_step` and beyond is purged: steps done again are drawn once.
            self._writer = SummaryWriter(str(directory), purge_step=first_step, flush_secs=_FLUSH_S)

        self._submit(open_writer)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        def write() -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for all of them: add_scalar's event for each costs five times the CPU, next to the training.
            figures = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._writer.file_writer.add_summary(Summary(value=figures), step)
            if time.monotonic() - self._uploaded_s > _UPLOAD_EVERY_S:
                self._upload()

        self._submit(write)

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        def write() -> None:
            import numpy as np

            self._writer.add_histogram(tag, np.asarray(values), step)

        self._submit(write)

    def close(self) -> None:
        def end() -> None:
            self._writer.close()
            self._upload()
            if self._spool:
                self._spool.cleanup()

        self._submit(end)
        self._thread.shutdown()

    def _upload(self) -> None:
        self._uploaded_s = time.monotonic()
        if self._spool:
            self._writer.flush()
            for path in Path(self._spool.name).iterdir():
                self._store.commit(f"{_FOLDER}/{path.name}", path.read_bytes())

    def _submit(self, work: Callable[[], object]) -> None:
        def attempt() -> None:
            try:
                if not self._failed:
                    work()
            except Exception as error:
                self._failed = True
                _log.warning("TensorBoard is off until the next attempt, training goes on: %s", error)

        self._thread.submit(attempt)
