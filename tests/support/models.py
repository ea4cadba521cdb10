"""Models for the small run that are more than a chain of layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.small import VOCABULARY

WIDTH = 12


class Embedded(nn.Module):
    """Embeds tokens and predicts from their embeddings. Models derived from it compute something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.between(self.embedding(tokens), tokens))
        return logits

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden


class Normalised(Embedded):
    """Statistics of its inputs are buffers, which every forward in training changes."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        normal: Tensor = self.norm(hidden.transpose(1, 2))
        return normal.transpose(1, 2)


class Branched(Embedded):
    """Half of its microbatches, by what is in them, do not use one of its layers; another is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return hidden + torch.tanh(self.sometimes(hidden)) if int(tokens.sum()) % 2 else hidden


class Codebook(Embedded):
    """Keeps a table that every forward in training moves, in place, and one that it replaces."""

    codes: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        if self.training:
            self.codes.mul_(0.9).add_(hidden.detach().mean((0, 1)), alpha=0.1)
            self.seen = self.seen + 1
        return hidden + self.codes


class Layers(Embedded):
    """Two like layers, whose statistics of their inputs every forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.BatchNorm1d(12), nn.Conv1d(12, 12, 1)) for _ in range(2)])

    def between(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        hidden = hidden.transpose(1, 2)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.transpose(1, 2)


class Fused(nn.Module):
    """Holds two weights in one, as fused attention does. In its state_dict each has a name, by `split`."""

    def __init__(self, width: int = 4, split: Callable[[Tensor], Tensor] = torch.clone, joins: bool = True) -> None:
        super().__init__()
        self.fused, self.split, self.joins = nn.Parameter(torch.randn(2 * width, width) * 0.1), split, joins
        self.register_state_dict_post_hook(self._split)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(self._join)  # type: ignore[no-untyped-call]

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        query, key = state.pop(f"{prefix}fused").chunk(2)
        state[f"{prefix}query"], state[f"{prefix}key"] = module.split(query), module.split(key)

    @staticmethod
    def _join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if module.joins:
            state[f"{prefix}fused"] = torch.cat([state.pop(f"{prefix}query"), state.pop(f"{prefix}key")])

    def forward(self, hidden: Tensor) -> Tensor:
        query, key = (hidden @ self.fused.T).chunk(2, dim=-1)
        return hidden + query * torch.tanh(key)


class Extra(nn.Linear):
    """Scales its input by a number that it keeps as an extra state, or keeps anything else."""

    def __init__(self, extra: Any) -> None:
        super().__init__(4, 1)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.extra)
