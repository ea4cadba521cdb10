"""Images and tables of hooks, as trackers draw them."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from steadfast.errors import TrainingError
from steadfast.telemetry.media import is_image, pixels_of, png_of, table_of

RED = np.zeros((2, 3, 3), dtype=np.uint8)
RED[..., 0] = 255


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (RED, RED),
        (torch.from_numpy(RED).permute(2, 0, 1), RED),
        (torch.from_numpy(RED).permute(2, 0, 1).to(torch.bfloat16) / 255, RED),
        (Image.fromarray(RED), RED),
        (np.full((2, 3), 0.5), np.full((2, 3, 1), 128)),
        (torch.tensor([[-1.0, 2.0, float("nan")]]), np.array([[[0], [255], [0]]])),
    ],
)
def test_an_image_of_any_kind_becomes_the_same_pixels(value: Any, expected: Any) -> None:
    assert is_image(value)
    pixels = pixels_of(value, "face")
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, expected)
    read = np.asarray(Image.open(io.BytesIO(png_of(pixels))))
    assert np.array_equal(read.reshape(pixels.shape), pixels)


def test_numbers_and_texts_are_no_images_and_one_of_another_shape_is_refused() -> None:
    assert not any(map(is_image, [1.0, torch.tensor(1.0), np.float64(1.0), "text", 3]))
    with pytest.raises(TrainingError, match=r"run.log: face has the shape \(2, 3, 4, 5\). An image is a tensor"):
        pixels_of(torch.zeros(2, 3, 4, 5), "face")


def test_a_table_has_aligned_columns() -> None:
    assert table_of([], "rows") == ""
    assert table_of([{"name": "a", "n": 100}, {"name": "long", "n": 2}], "rows") == "name  n\na     100\nlong  2"
    with pytest.raises(TrainingError, match=r"run\.log: rows is a list, and a table is a list of dictionaries"):
        table_of([1, 2], "rows")
