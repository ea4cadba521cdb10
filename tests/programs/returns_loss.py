"""A task that returns its mean loss, as a plain loop would."""

from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.programs.nadam import Model, data
from tests.programs.program import BOTH, Program

__all__ = ["Model", "data"]


class Task:
    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, wanted = batch
        return mse_loss(model(inputs), wanted)


PROGRAM = Program(
    __name__,
    "task that returns a mean loss",
    refused=dict.fromkeys(BOTH, "Task.loss returned a Tensor, not Sums"),
    advice="`Sums(loss * len(batch), len(batch))`",
)
