"""User code with something wrong in it."""

import torch
from torch import Tensor, nn

from steadfast.tasks import Classification, Sums


class FailsAtStep7(Classification):
    def __init__(self) -> None:
        self._num_steps = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        if torch.is_grad_enabled():
            self._num_steps += 1
            if self._num_steps == 20:
                raise ValueError("a bug in the user's loss")
        return super().loss(model, batch)
