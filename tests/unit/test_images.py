"""`data: {kind: image_folder}`, on real image files."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.examples.operators  # noqa: F401 - before torchvision
from steadfast.config import ImageFolderData, ValidationImages
from steadfast.data.datasets import build_dataset, build_validation
from steadfast.data.loader import Loader
from steadfast.data.order import SampleOrder
from steadfast.data.randomness import own_randomness
from steadfast.errors import ConfigError, DataError
from tests.support.loading import CPU, microbatches

from PIL import Image  # isort: skip


def write_images(folder: Path, classes: str = "ab", each: int = 4) -> str:
    """Write images of 40 x 60 pixels, whose left half is of another colour than the right one."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(each):
            pixels = np.zeros((40, 60, 3), np.uint8)
            pixels[:, :30] = 60 * label + 10 * index
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return str(folder)


def test_a_sample_is_an_image_and_the_place_of_its_class(tmp_path: Path) -> None:
    path = write_images(tmp_path)
    dataset = build_dataset(ImageFolderData(path=path, image_size=28, augment=False))
    assert len(dataset) == 8
    image, label = dataset[5]
    assert (type(image), image.dtype, image.shape, label) == (torch.Tensor, torch.float32, (3, 28, 28), 1)
    # The middle of the image, by ImageNet's statistics: 70 of 255 on the left, black on the right.
    for channel, (mean, deviation) in enumerate([(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]):
        assert image[channel, 14, 0] == pytest.approx((70 / 255 - mean) / deviation, abs=1e-3)
        assert image[channel, 14, -1] == pytest.approx(-mean / deviation, abs=1e-3)


def test_augmentation_follows_from_the_sample_and_validation_has_none(tmp_path: Path) -> None:
    config = ImageFolderData(path=write_images(tmp_path), image_size=16)
    dataset: Any = build_dataset(config)

    def drawn(key: int) -> torch.Tensor:
        with own_randomness(key):
            image: torch.Tensor = dataset[5][0]
            return image

    assert torch.equal(drawn(1), drawn(1))
    assert len({drawn(key).numpy().tobytes() for key in range(8)}) == 8
    plain = build_dataset(config.model_copy(update={"augment": False}))
    own = {"validation": ValidationImages(path=config.path, image_size=16)}
    for of_config in (config, config.model_copy(update=own)):
        held_out = build_validation(of_config, dataset)
        assert all(torch.equal(held_out[index][0], plain[index][0]) for index in range(8))


def test_images_go_through_the_loader_and_to_its_processes(tmp_path: Path) -> None:
    config = ImageFolderData(path=write_images(tmp_path), image_size=16, num_workers=0)
    dataset: Any = build_dataset(config)
    assert pickle.loads(pickle.dumps(dataset)).classes == ["a", "b"]
    loader = Loader(dataset, SampleOrder(8, 0.25, 1), config, CPU)
    (fetched,) = loader.steps(microbatches(0, 6))
    images, labels = fetched.batch
    assert (images.shape, labels.dtype) == ((6, 3, 16, 16), torch.int64)
    assert loader.num_validation == 2


def test_unusable_folders_say_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is no folder with a folder of images for each class: .*none"):
        build_dataset(ImageFolderData(path=str(tmp_path / "none")))
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match=r"each class: .* no valid file for the classes a"):
        build_dataset(ImageFolderData(path=str(tmp_path / "empty")))
    dataset = build_dataset(ImageFolderData(path=write_images(tmp_path / "train", "abc")))
    own = ValidationImages(path=write_images(tmp_path / "val", "ac"))
    with pytest.raises(DataError, match=r"data\.validation and data have different classes: b"):
        build_validation(ImageFolderData(path=own.path, validation=own), dataset)


def test_without_torchvision_one_error_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(ConfigError) as raised:
        build_dataset(ImageFolderData(path=write_images(tmp_path)), "data.validation")
    remedy = "pip install 'steadfast[vision]'"
    assert str(raised.value).startswith(f"data.validation.kind: needs torchvision: {remedy} (")
