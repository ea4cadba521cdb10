"""User code with something wrong in it."""

import torch
from torch import Tensor, nn

from steadfast.tasks import Classification, Sums
from tests.examples import digits


class Ragged:
    """The digits, with one pixel missing from one of them."""

    def __init__(self) -> None:
        self._digits = digits.dataset()

    def __len__(self) -> int:
        return len(self._digits)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        pixels, label = self._digits[index]
        return (pixels[:63] if index == 700 else pixels), label


def dataset() -> Ragged:
    return Ragged()


class FailsAtStep7(Classification):
    def __init__(self) -> None:
        self._num_steps = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        if torch.is_grad_enabled():
            self._num_steps += 1
            if self._num_steps == 20:
                raise ValueError("a bug in the user's loss")
        return super().loss(model, batch)
