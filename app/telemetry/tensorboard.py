"""Figures for TensorBoard."""

from collections.abc import Callable, Sequence

from app.storage import Store
from app.telemetry.background import Background
from app.telemetry.spool import Spool


class TensorBoardTracker:
    """Writes TensorBoard's event files, on a thread of its own."""

    def __init__(self, store: Store, first_step: int) -> None:
        self._spool = Spool(store, "tensorboard")
        self._background = Background("TensorBoard")

        def open_writer() -> None:
            # Over a second, which the thread pays and the first step does not wait for.
            from torch.utils.tensorboard.writer import SummaryWriter

            # What an earlier attempt drew at `first_step` and beyond is purged: steps done again are drawn once.
            self._writer = SummaryWriter(str(self._spool.path), purge_step=first_step)

        self._background.submit(open_writer)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        def write() -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # One event for all of them: add_scalar's event for each costs five times the CPU, next to the training.
            figures = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._writer.file_writer.add_summary(Summary(value=figures), step)

        self._submit(write)

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        def write() -> None:
            import numpy as np

            self._writer.add_histogram(tag, np.asarray(values), step)

        self._submit(write)

    def text(self, step: int, tag: str, text: str) -> None:
        # Indented by four it is code to Markdown: lines and spaces stay as they are.
        as_code = "\n".join(f"    {line}" for line in text.splitlines())
        self._submit(lambda: self._writer.add_text(tag, as_code, step))

    def _submit(self, write: Callable[[], None]) -> None:
        def write_through() -> None:
            write()
            # At once, since a killed leader loses what is in its buffers, and its steps need not be done again.
            self._writer.flush()
            if self._spool.due:
                self._spool.upload()

        self._background.submit(write_through)

    def close(self) -> None:
        def end() -> None:
            self._writer.close()
            self._spool.close()

        self._background.close(end)
