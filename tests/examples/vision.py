"""A classifier of images as a user of torchvision brings it: a ResNet, images with augmentation, top-1 and top-5."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import tests.examples.operators  # noqa: F401 - before torchvision
from steadfast.tasks import Sums

from torchvision import models  # isort: skip
from torchvision.transforms import v2  # isort: skip


def resnet18(num_classes: int) -> nn.Module:
    """ResNet-18 as torchvision has it. At 32 x 32 pixels its last feature map is one pixel: norms need two images."""
    model: nn.Module = models.resnet18(num_classes=num_classes)
    return model


class Digits:
    """Scikit-learn's 1,797 handwritten digits, enlarged to what a network for photographs takes: (3, size, size).

    Args:
        split: "train" (the first 1,500) or "validation" (the others, of other writers).
    """

    num_train = 1500

    def __init__(self, split: str, size: int = 32, augment: bool = True) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        rows = slice(None, self.num_train) if split == "train" else slice(self.num_train, None)
        images = torch.from_numpy((pixels[rows] / 16).astype(np.float32)).view(-1, 1, 8, 8)
        self._images = F.interpolate(images, size=size, mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
        self._labels = labels[rows].tolist()
        self._arguments = split, size
        self._augment = v2.RandomCrop(size, padding=size // 8) if augment else nn.Identity()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, moved by up to an eighth of its size where it is augmented, and its digit."""
        return self._augment(self._images[index]), self._labels[index]

    def without_augmentation(self) -> Digits:
        return Digits(*self._arguments, augment=False)


class TopClassification:
    """Cross entropy, with the shares of images whose class is the likeliest, and among the five likeliest."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        images, labels = batch
        logits = model(images).float()
        loss_sum = F.cross_entropy(logits, labels, reduction="sum")
        found = logits.topk(5).indices == labels[:, None]  # (microbatch, 5)
        return Sums(loss_sum, len(labels), {"top1": found[:, 0].sum(), "top5": found.sum()})
