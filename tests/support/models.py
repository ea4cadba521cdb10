"""Models for the small run that are more than a chain of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.small import VOCABULARY


class Normalised(nn.Module):
    """Statistics of its inputs are buffers, which every forward in training changes."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.norm = nn.BatchNorm1d(12, momentum=momentum)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(hidden)
        return logits


class Branched(nn.Module):
    """Half of its microbatches, by what is in them, do not use one of its layers; another is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.sometimes = nn.Linear(12, 12)
        self.never = nn.Linear(12, 12)
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if int(tokens.sum()) % 2:
            hidden = hidden + torch.tanh(self.sometimes(hidden))
        logits: Tensor = self.head(hidden)
        return logits


class Codebook(nn.Module):
    """Keeps a table that every forward in training moves, in place, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.head = nn.Linear(12, VOCABULARY)
        self.codes: Tensor
        self.seen: Tensor
        self.register_buffer("codes", torch.zeros(12))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.training:
            self.codes.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
            self.seen = self.seen + 1
        logits: Tensor = self.head(hidden + self.codes)
        return logits


class Layers(nn.Module):
    """Two like layers, whose statistics of their inputs every forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.layers = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(12), nn.Conv1d(12, 12, 1)) for _ in range(2)])
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden.transpose(1, 2))
        return logits
