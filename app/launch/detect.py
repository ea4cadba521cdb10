"""Find out how this process was started."""

import os
import re

import psutil

from app.errors import UsageError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_REMEDY = "Start with torchrun, or unset them to train under Ray"


def under_torchrun() -> bool:
    """Return whether torchrun, or somebody who sets the same environment, has started this process.

    Raises:
        UsageError: only a part of that environment is set, or no world can have it.
    """
    present = [name for name in _TORCHRUN if name in os.environ]
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if present and missing:
        raise UsageError(
            f"{', '.join(present)} set without {', '.join(missing)}: half of torchrun's environment. {_REMEDY}"
        )
    if present:
        _check_numbers()
    return bool(present)


def _check_numbers() -> None:
    """Raise UsageError for numbers with which torch would wait for other ranks until its time-out of half an hour."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not re.fullmatch(r"\d{1,9}", os.environ[name]):
            raise UsageError(f"{name}={os.environ[name]}: must be a number. {_REMEDY}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise UsageError(f"RANK={rank} with WORLD_SIZE={world_size}: ranks go from 0 to WORLD_SIZE - 1. {_REMEDY}")
    if int(os.environ["MASTER_PORT"]) > 65535:
        raise UsageError(f"MASTER_PORT={os.environ['MASTER_PORT']}: ports go up to 65535. {_REMEDY}")


def given_s(started_s: float) -> float:
    """Return when the command was given of a process that started at `started_s`, both as Unix time."""
    # Torchrun, which imports torch before it starts a rank, is what the user has typed.
    return psutil.Process(os.getppid()).create_time() if "TORCHELASTIC_RUN_ID" in os.environ else started_s
