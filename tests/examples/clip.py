"""A small CLIP: images of digits and their captions, embedded by two towers, contrasted over the whole global batch."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset

from steadfast.tasks import Sums
from tests.examples.digits import dataset

_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CAPTION_LENGTH = 40  # bytes


def _encoded(caption: str) -> Tensor:
    """Return a caption as bytes, int64 (40,), zeros behind its end."""
    return torch.tensor(list(caption.encode().ljust(_CAPTION_LENGTH, b"\0")))


class Captioned(Dataset[dict[str, Tensor]]):
    """Scikit-learn's digits: image (64,) float32, caption (40,) int64 and digit () int64."""

    def __init__(self) -> None:
        self._digits = dataset()
        self._captions = [_encoded(f"a handwritten {name}") for name in _NAMES]

    def __len__(self) -> int:
        return len(self._digits)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, digit = self._digits[index]
        return {"image": image, "caption": self._captions[int(digit)], "digit": digit}


class TwoTowers(nn.Module):
    """One tower for images, one for captions; a learned scale of their products."""

    def __init__(self, width: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.characters = nn.Embedding(256, 64)
        self.caption = nn.Sequential(nn.Linear(64 * _CAPTION_LENGTH, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, images: Tensor, captions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings of images and of captions, (microbatch, width) each, and the scale, (microbatch,)."""
        image = F.normalize(self.image(images), dim=-1)
        caption = F.normalize(self.caption(self.characters(captions).flatten(1)), dim=-1)
        return image, caption, self.log_scale.exp().expand(len(images))


class Contrast:
    """Contrast each image with the captions of the global batch, and each caption with the images.

    Pairs of one digit have one caption, so all images of a digit are right for it.
    """

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        image, caption, scale = model(batch["image"], batch["caption"])
        # The scale is one number; a row for each sample lets it be gathered with the rest.
        return {"image": image, "caption": caption, "scale": scale, "digit": batch["digit"]}

    def loss(self, embeddings: dict[str, Tensor]) -> Sums:
        """Sum over the pairs; `embeddings` has a row for each sample of the global batch."""
        logits = embeddings["scale"].mean() * embeddings["image"] @ embeddings["caption"].T
        same = (embeddings["digit"][:, None] == embeddings["digit"]).to(logits.dtype)
        wanted = same / same.sum(1, keepdim=True)
        loss_sum = (
            F.cross_entropy(logits, wanted, reduction="sum") + F.cross_entropy(logits.T, wanted, reduction="sum")
        ) / 2
        found = embeddings["digit"][logits.argmax(1)]
        return Sums(loss_sum, len(logits), {"matched": (found == embeddings["digit"]).sum()})
