"""Tracker for TensorBoard."""

from collections.abc import Sequence
from pathlib import Path

from steadfast.telemetry.media import Pixels, png_of


class TensorBoardTracker:
    """Writes TensorBoard's event files into a folder."""

    # Importing TensorBoard takes over a second, so the thread that draws imports it.
    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # Figures that an earlier attempt drew from `first_step` on are purged, so that steps done again are drawn once.
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    # Each method flushes, because a killed leader loses unflushed figures.
    def scalars(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # All values go into one event. One call of `add_scalar` for each value takes five times as much CPU.
        figures = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.file_writer.add_summary(Summary(value=figures), step)
        self._writer.flush()

    def histogram(self, step: int, tag: str, values: Sequence[float]) -> None:
        import numpy as np

        self._writer.add_histogram(tag, np.asarray(values), step)
        self._writer.flush()

    def text(self, step: int, tag: str, text: str) -> None:
        # Markdown shows lines indented by four spaces as code, which keeps line breaks and spaces.
        as_code = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text(tag, as_code, step)
        self._writer.flush()

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        height, width, channels = pixels.shape
        encoded = png_of(pixels)
        image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=encoded)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
