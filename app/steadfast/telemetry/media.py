"""Convert what hooks log into the pixels and texts that trackers draw."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from steadfast.errors import TrainingError

Pixels = npt.NDArray[np.uint8]  # (height, width, channels), with 1 or 3 channels
_COLOR_TYPES = {1: 0, 3: 2}  # channels -> PNG's number for gray and for RGB


def is_image(value: Any) -> bool:
    """Return whether a value is a tensor or array with rows and columns, or an image of Pillow."""
    return getattr(value, "ndim", 0) >= 2 or (hasattr(value, "__array_interface__") and not hasattr(value, "ndim"))


def pixels_of(value: Any, tag: str) -> Pixels:
    """Return the pixels of an image.

    Args:
        value: a tensor (height, width) or (channels, height, width), an array (height, width) or (height, width,
            channels), or an image of Pillow. Floating-point values go from 0 to 1.

    Raises:
        TrainingError: the value has another shape.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().float() if value.is_floating_point() else value.detach()
        array = tensor.cpu().numpy()
        if array.ndim == 3:
            array = array.transpose(1, 2, 0)
    else:
        array = np.asarray(value)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in _COLOR_TYPES:
        raise TrainingError(
            f"run.log: {tag} has the shape {tuple(np.shape(value))}. An image is a tensor (height, width) or (1 or 3, "
            "height, width), or an array (height, width) or (height, width, 1 or 3)"
        )
    if array.dtype.kind == "f":
        array = np.nan_to_num(array).clip(0.0, 1.0) * 255.0 + 0.5
    return array.astype(np.uint8)


def png_of(pixels: Pixels) -> bytes:
    """Return an image as a PNG file (www.w3.org/TR/png)."""
    # Pillow, which would do this too, is only installed for vision.
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunks = [_chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def table_of(rows: Sequence[Any], tag: str) -> str:
    """Return a table as text with aligned columns.

    Args:
        rows: dictionaries with the same keys, whose keys are the headings.

    Raises:
        TrainingError: the rows are no dictionaries.
    """
    if not all(isinstance(row, Mapping) for row in rows):
        raise TrainingError(f"run.log: {tag} is a list, and a table is a list of dictionaries, one for each row")
    if not rows:
        return ""
    lines = [list(map(str, rows[0]))]
    for row in rows:
        lines.append([str(row.get(heading, "")) for heading in rows[0]])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        padded.append("  ".join(cells).rstrip())
    return "\n".join(padded)
