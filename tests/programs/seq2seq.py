"""Translation with padding: the loss is a mean over the words of the global batch, and gradients are clipped."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from steadfast import Sums
from tests.programs.program import Batch, Program, Trained, build, integers, train, whole_batches

PAD, WORDS, LENGTH = 0, 13, 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=PAD)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        found, _ = self.encoder(self.words(source))
        last = found[torch.arange(len(source)), (source != PAD).sum(1) - 1]
        return torch.as_tensor(self.head(self.decoder(self.words(target), last[None])[0]))


def texts(seed: int) -> Tensor:
    """Return texts of two words and more, padded at their ends."""
    words = 1 + integers(WORDS - 1, 33, LENGTH, seed=seed)
    lengths = 2 + integers(LENGTH - 1, 33, 1, seed=seed + 10)
    return words.masked_fill(torch.arange(LENGTH) >= lengths, PAD)


def data() -> TensorDataset:
    return TensorDataset(texts(1), texts(2))


def plain() -> Trained:
    model = build(Model)

    def loss(batch: Batch) -> Tensor:
        source, target = batch
        logits = model(source, target[:, :-1])
        return cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)

    return train(model, whole_batches(data()), loss, max_norm=0.1)


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
        source, target = batch
        logits, wanted = model(source, target[:, :-1]), target[:, 1:]
        loss_sum = cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum")
        return Sums(loss_sum, (wanted != PAD).sum())


PROGRAM = Program(
    __name__,
    "seq2seq with padding, mean over words, gradients clipped",
    plain,
    words=("optimizer.max_grad_norm=0.1",),
    advice="`Sums.count` is the number of words",
)
