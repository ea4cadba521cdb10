"""A recommender whose embedding has sparse gradients."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import BOTH, Program, integers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(100, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, items: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.items(items))[:, 0])


def data() -> TensorDataset:
    return TensorDataset(integers(100, 33, 5), integers(2, 33).double())


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        items, clicked = batch
        loss_sum = binary_cross_entropy_with_logits(model(items), clicked, reduction="sum")
        return Sums(loss_sum, len(clicked))


PROGRAM = Program(
    __name__,
    "embedding with sparse gradients",
    refused=dict.fromkeys(BOTH, "has sparse=True, but gradients here are dense"),
    advice="`sparse=False`",
)
