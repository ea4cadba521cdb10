"""Speech recognition by CTC: samples of different lengths, padded by a collate function."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss
from torch.nn.utils.rnn import pad_sequence

from steadfast import Sums
from tests.programs.program import Program, Trained, batches, build, integers, numbers, train

LETTERS = 5  # the first is the blank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, LETTERS)

    def forward(self, frames: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.memory(frames)[0]).log_softmax(-1))


class Speech:
    def __len__(self) -> int:
        return 33

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        length = 2 + index % 3
        return numbers(3 * length + index % 4, 3, seed=index), 1 + integers(LETTERS - 1, length, seed=index)


data = Speech


class Padded(NamedTuple):
    frames: Tensor
    letters: Tensor
    num_frames: Tensor
    num_letters: Tensor


def collate(samples: list[tuple[Tensor, Tensor]]) -> Padded:
    frames, letters = (list(parts) for parts in zip(*samples, strict=True))
    sizes = (torch.tensor([len(part) for part in parts]) for parts in (frames, letters))
    return Padded(pad_sequence(frames, batch_first=True), pad_sequence(letters, batch_first=True), *sizes)


def loss_of(model: nn.Module, batch: Padded) -> Tensor:
    scores = model(batch.frames).transpose(0, 1)
    return ctc_loss(scores, batch.letters, batch.num_frames, batch.num_letters, reduction="sum")


def plain() -> Trained:
    model, dataset = build(Model), data()

    def loss(parts: list[list[int]]) -> Tensor:
        samples = [dataset[index] for ids in parts for index in ids]
        return loss_of(model, collate(samples)) / len(samples)

    return train(model, (parts for _, parts in batches(len(dataset))), loss)


class Task:
    def loss(self, model: nn.Module, batch: Padded) -> Sums:
        return Sums(loss_of(model, batch), len(batch.frames))


PROGRAM = Program(
    __name__,
    "CTC: samples of different lengths",
    plain,
    words=(f"data.collate={{target: '{__name__}:collate'}}",),
    advice="`data.collate` pads",
)
