"""Forwards that take as long as on an accelerator, which leaves the processor alone meanwhile.

On two cores it would otherwise be the training, and not the recovery beside it, that decides how long a process takes
to start. A file says how much longer each training forward of a contender lasts; without it, it runs at full speed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from steadfast.tasks import LanguageModeling, Sums


class Paced(LanguageModeling):
    """What `task.target` names when the application is drilled."""

    def __init__(self, file: str) -> None:
        self._file = file

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        pace(self._file)
        return super().loss(model, batch)


def pace(file: str) -> None:
    """Wait for as long as the file says."""
    if torch.is_grad_enabled() and Path(file).exists():
        with suppress(FileNotFoundError):
            Path(file).with_suffix(".raise").unlink()  # one process removes it
            raise ValueError("a bug in the training loop")
        with suppress(OSError, ValueError):  # it is gone by now
            time.sleep(float(Path(file).read_text()))


def set_pace(file: Path, seconds: float | None) -> None:
    """Have every training forward that looks at the file last `seconds` longer; None is full speed."""
    if seconds is None:
        file.unlink(missing_ok=True)
        return
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(file)
