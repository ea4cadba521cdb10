"""A language model whose head is its embedding, with a schedule of its own."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Batch, Program, Trained, build, integers, train, whole_batches

WORDS = 13


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return torch.as_tensor(self.head(torch.tanh(self.inner(self.embedding(words)))))


def data() -> TensorDataset:
    return TensorDataset(integers(WORDS, 33, 6))


def falling(step: int, num_steps: int) -> float:
    return float(0.8 ** (step - 1))


def plain() -> Trained:
    model = build(Model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    def loss(batch: Batch) -> Tensor:
        (words,) = batch
        return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    return train(model, whole_batches(data()), loss, optimizer, after_step=schedule.step)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Sums:
        (words,) = batch
        wanted = words[:, 1:].flatten()
        return Sums(cross_entropy(model(words[:, :-1]).flatten(0, 1), wanted, reduction="sum"), len(wanted))


PROGRAM = Program(
    __name__,
    "tied weights, a schedule of one's own",
    plain,
    words=(f"schedule={{target: '{__name__}:falling'}}",),
    advice="`schedule.target` is a function of the step",
)
