"""User code that takes its time."""

from __future__ import annotations

import time

from torch import Tensor, nn

from app.tasks import LanguageModeling, Sums


class Slow(LanguageModeling):
    """Every forward takes two seconds."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        time.sleep(2)
        return super().loss(model, batch)
