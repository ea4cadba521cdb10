"""Forwards that take as long as on an accelerator, which leaves the processor alone meanwhile.

On two cores it would otherwise be the training, and not the recovery beside it, that decides how long a process takes
to start. While `file` exists every training forward lasts `seconds` longer; without it the rest runs at full speed.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn

from app.tasks import LanguageModeling, Sums


class Paced(LanguageModeling):
    """What `task.target` names when the application is drilled."""

    def __init__(self, file: str, seconds: float) -> None:
        self._file, self._seconds = file, seconds

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        pace(self._file, self._seconds)
        return super().loss(model, batch)


def pace(file: str, seconds: float) -> None:
    if torch.is_grad_enabled() and Path(file).exists():
        time.sleep(seconds)
