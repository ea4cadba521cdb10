"""Tracker for TensorBoard."""

from collections.abc import Callable, Sequence

from steadfast.storage import Store
from steadfast.telemetry.background import Background
from steadfast.telemetry.media import Pixels, png_of
from steadfast.telemetry.spool import Spool


class TensorBoardTracker:
    """Writes TensorBoard's event files on a background thread."""

    def __init__(self, store: Store, first_step: int) -> None:
        self._spool = Spool(store, "tensorboard")
        self._background = Background("TensorBoard")

        def open_writer() -> None:
            # The import takes over a second. On the background thread it does not delay the first step.
            from torch.utils.tensorboard.writer import SummaryWriter

            # Figures that an earlier attempt drew from `first_step` on are purged, so that steps done again are drawn
            # once.
            self._writer = SummaryWriter(str(self._spool.path), purge_step=first_step)

        self._background.submit(open_writer)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._background.submit(lambda: self._draw(step, values))

    def resend(self, step: int, values: dict[str, float]) -> None:
        self._background.submit(lambda: self._spool.make_up(step, values, self._draw))

    def _draw(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # All values go into one event. One call of `add_scalar` for each value takes five times as much CPU.
        figures = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(lambda: self._writer.file_writer.add_summary(Summary(value=figures), step))
        self._spool.note(step, values)

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        def write() -> None:
            import numpy as np

            self._writer.add_histogram(tag, np.asarray(values), step)

        self._submit(write)

    def text(self, step: int, tag: str, text: str) -> None:
        # Markdown shows lines indented by four spaces as code, which keeps line breaks and spaces.
        as_code = "\n".join(f"    {line}" for line in text.splitlines())
        self._submit(lambda: self._writer.add_text(tag, as_code, step))

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        def write() -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            height, width, channels = pixels.shape
            encoded = png_of(pixels)
            image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=encoded)
            self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

        self._submit(write)

    def _submit(self, write: Callable[[], None]) -> None:
        self._background.submit(lambda: self._write(write))

    def _write(self, write: Callable[[], None]) -> None:
        write()
        # A killed leader loses unflushed figures.
        self._writer.flush()
        if self._spool.due:
            self._spool.upload()

    def close(self) -> None:
        def end() -> None:
            self._writer.close()
            self._spool.close()

        self._background.close(end)
