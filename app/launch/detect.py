"""Find out how this process was started."""

import os

import psutil

from app.errors import UsageError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Return whether torchrun, or somebody who sets the same environment, has started this process.

    Raises:
        UsageError: only a part of that environment is set.
    """
    present = [name for name in _TORCHRUN if name in os.environ]
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if present and missing:
        raise UsageError(
            f"{', '.join(present)} set without {', '.join(missing)}: half of torchrun's environment. "
            "Start with torchrun, or unset them to train under Ray"
        )
    return bool(present)


def given_s(started_s: float) -> float:
    """Return when the command was given of a process that started at `started_s`, both as Unix time."""
    # Torchrun, which imports torch before it starts a rank, is what the user has typed.
    return psutil.Process(os.getppid()).create_time() if "TORCHELASTIC_RUN_ID" in os.environ else started_s
