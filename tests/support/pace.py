"""Forwards that take as long as on an accelerator, which leaves the processor alone meanwhile.

On two cores it would otherwise be the training, and not the recovery beside it, that decides how long a process takes
to start. A file says how much longer each training forward of a contender lasts; without it, it runs at full speed.
A file beside it with another suffix is a fault for one process: `.raise` an exception, `.flip` a wrong bit in a weight.
"""

import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from steadfast.injection.flips import flip_bit
from steadfast.tasks import LanguageModeling, Sums

_FLIPPED_WEIGHT = 5  # a parameter that each sample uses
_FLIPPED_BIT = 51  # of fp64: the highest one of the fraction


class Paced(LanguageModeling):
    """What `task.target` names when the application is drilled."""

    def __init__(self, file: str) -> None:
        self._file = file

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Sums:
        pace(self._file, model)
        return super().loss(model, batch)


def pace(file: str, model: nn.Module) -> None:
    """Wait for as long as the file says."""
    if torch.is_grad_enabled() and Path(file).exists():
        if _takes(Path(file).with_suffix(".raise")):
            raise ValueError("a bug in the training loop")
        if _takes(Path(file).with_suffix(".flip")):
            flip_bit(list(model.parameters())[_FLIPPED_WEIGHT], 0, _FLIPPED_BIT)
        with suppress(OSError, ValueError):  # it is gone by now
            time.sleep(float(Path(file).read_text()))


def _takes(file: Path) -> bool:
    """Return whether this process, and no other, has removed the file."""
    with suppress(FileNotFoundError):
        file.unlink()
        return True
    return False


def set_pace(file: Path, seconds: float | None) -> None:
    """Have every training forward that looks at the file last `seconds` longer; None is full speed."""
    if seconds is None:
        file.unlink(missing_ok=True)
        return
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(file)
