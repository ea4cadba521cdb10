"""User code that takes its time."""

import os
import random
import time

from torch import Tensor, nn

from steadfast.tasks import LanguageModeling, Sums


class Slow(LanguageModeling):
    """Every forward takes two seconds."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        time.sleep(2)
        return super().loss(model, batch)


class NowAndThen(LanguageModeling):
    """A forward in fifty takes 1 to 40 seconds, on each rank by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._chance = random.Random(os.getpid())

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        if self._chance.random() < 0.02:
            time.sleep(self._chance.uniform(1.0, 40.0))
        return super().loss(model, batch)
