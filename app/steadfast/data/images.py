"""Read images in one folder per class, by torchvision."""

from typing import Any

import torch
from torch import Tensor

from steadfast.config import ImageFolderSource
from steadfast.data.extras import import_extra
from steadfast.errors import DataError
from steadfast.run.directory import place_of_data

# ImageNet's figures, on which most pretrained weights were trained.
_MEAN = (0.485, 0.456, 0.406)
_DEVIATION = (0.229, 0.224, 0.225)


class ImageFolder:
    """Images of torchvision's ImageFolder as tensors.

    The class of an image is the index of its folder's name.
    """

    def __init__(self, folder: Any, image_size: int, augment: bool, key: str) -> None:
        self.classes: list[str] = folder.classes
        self._folder = folder
        self._image_size = image_size
        self._key = key
        self._transform = _transform(image_size, augment, key)

    def __len__(self) -> int:
        return len(self._folder)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        """Return (image, class), the image as float32 (3, image_size, image_size)."""
        image, label = self._folder[index]
        return self._transform(image), label

    def without_augmentation(self) -> "ImageFolder":
        return ImageFolder(self._folder, self._image_size, False, self._key)


def open_image_folder(config: ImageFolderSource, key: str) -> ImageFolder:
    """Open the image folder of the section at `key`.

    Raises DataError if the folder cannot be read, and ConfigError without torchvision.
    """
    datasets = import_extra("torchvision.datasets", "vision", f"{key}.kind")
    try:
        folder = datasets.ImageFolder(place_of_data(config.path))
    except OSError as error:
        raise DataError(f"{config.path!r} is no folder with a folder of images for each class: {error}") from error
    return ImageFolder(folder, config.image_size, config.augment, key)


def _transform(size: int, augment: bool, key: str) -> Any:
    v2 = import_extra("torchvision.transforms.v2", "vision", f"{key}.kind")
    # Validation usually crops the middle 224 of 256 pixels.
    crop = [v2.Resize(size * 8 // 7), v2.CenterCrop(size)]
    if augment:
        crop = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    as_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _DEVIATION)]
    return v2.Compose([*crop, *as_tensor, v2.ToPureTensor()])
