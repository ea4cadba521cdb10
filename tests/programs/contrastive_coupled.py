"""A contrastive loss whose negatives are the other samples of the microbatch, which `task.coupled` keeps together."""

import torch
from torch import Tensor

from tests.programs.contrastive import Model, Task, contrast, data
from tests.programs.program import GLOBAL_SIZE, Parts, Program, Trained, build, seeded_parts, train

__all__ = ["Model", "Task", "data"]


def plain() -> Trained:
    model = build(Model)

    def loss(parts: Parts) -> Tensor:
        return torch.stack([contrast(*model(*batch)) for batch in parts]).sum() / GLOBAL_SIZE

    return train(model, seeded_parts(data()), loss)


PROGRAM = Program(
    __name__,
    "contrastive loss, negatives of the microbatch",
    plain,
    words=("task.coupled=true",),
    advice="`task.coupled: true`",
)
