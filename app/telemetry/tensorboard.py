"""Figures for TensorBoard."""

from collections.abc import Sequence

from app.storage import Store
from app.telemetry.background import Background
from app.telemetry.spool import Spool

_FLUSH_S = 5  # not the default two minutes: this is what a killed leader loses


class TensorBoardTracker:
    """Writes TensorBoard's event files, on a thread of its own."""

    def __init__(self, store: Store, first_step: int) -> None:
        self._spool = Spool(store, "tensorboard")
        self._background = Background("TensorBoard")

        def open_writer() -> None:
            # Over a second, which the thread pays and the first step does not wait for.
            from torch.utils.tensorboard.writer import SummaryWriter

            # What an earlier attempt drew at `first_step` and beyond is purged: steps done again are drawn once.
            self._writer = SummaryWriter(str(self._spool.path), purge_step=first_step, flush_secs=_FLUSH_S)

        self._background.submit(open_writer)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        def write() -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for all of them: add_scalar's event for each costs five times the CPU, next to the training.
            figures = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._writer.file_writer.add_summary(Summary(value=figures), step)
            if self._spool.due:
                self._writer.flush()
                self._spool.upload()

        self._background.submit(write)

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        def write() -> None:
            import numpy as np

            self._writer.add_histogram(tag, np.asarray(values), step)

        self._background.submit(write)

    def text(self, step: int, tag: str, text: str) -> None:
        # Indented by four it is code to Markdown: lines and spaces stay as they are.
        as_code = "\n".join(f"    {line}" for line in text.splitlines())
        self._background.submit(lambda: self._writer.add_text(tag, as_code, step))

    def close(self) -> None:
        def end() -> None:
            self._writer.close()
            self._spool.close()

        self._background.submit(end)
        self._background.close()
