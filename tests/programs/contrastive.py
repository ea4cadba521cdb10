"""A contrastive loss whose negatives are the other samples of the microbatch, without `task.coupled`."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import BOTH, Program, numbers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.images(images), dim=1), normalize(self.texts(texts), dim=1)


def data() -> TensorDataset:
    return TensorDataset(numbers(33, 4, seed=1), numbers(33, 5, seed=2))


def contrast(images: Tensor, texts: Tensor) -> Tensor:
    """Return the loss of CLIP, summed over samples; the pairs of the batch are its negatives."""
    scores = images @ texts.T / 0.1
    own = torch.arange(len(scores))
    return (cross_entropy(scores, own, reduction="sum") + cross_entropy(scores.T, own, reduction="sum")) / 2


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        return Sums(contrast(*model(*batch)), len(batch[0]))


PROGRAM = Program(
    __name__,
    "contrastive loss, negatives of the batch",
    refused=dict.fromkeys(BOTH, "the loss follows from batch.microbatch_size"),
    advice="`task.coupled: true`, or `embed` and `loss(embeddings)` for negatives of the global batch",
)
