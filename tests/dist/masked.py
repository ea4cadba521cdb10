"""User code whose counts are unusual: samples that count for nothing, a loss of NaN where there is nothing to count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from steadfast.tasks import IGNORED, LanguageModeling, Sums
from tests.support.small import Tokens


class PartlyHidden(Tokens):
    """The tokens of the small run, as many that no sample comes twice; `hidden` ones count for nothing at all."""

    def __init__(self, num_samples: int, hidden: Sequence[int]) -> None:
        super().__init__(num_samples, masked=False)
        self._hidden = frozenset(hidden)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        inputs, targets = super().__getitem__(index)
        if index in self._hidden:
            targets = torch.full_like(targets, IGNORED)
        return inputs, targets


class MeanOfNothing(LanguageModeling):
    """A task that forms means, as many do: where everything is masked, its loss is NaN and so are its gradients."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        sums = super().loss(model, batch)
        return replace(sums, loss_sum=sums.loss_sum / sums.count * sums.count)


class CountsNaN(LanguageModeling):
    def loss(self, model: nn.Module, batch: Any) -> Sums:
        return replace(super().loss(model, batch), count=torch.tensor(float("nan")))
