"""Detect how this process was started."""

import os
import re
import sys
from pathlib import Path

import psutil

from steadfast.errors import UsageError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_REMEDY = "Start with torchrun, or unset them to train under Ray"


def under_torchrun() -> bool:
    """Return whether this process has the environment that torchrun sets.

    Raises:
        UsageError: only a part of that environment is set, or its numbers are impossible.
    """
    present = [name for name in _TORCHRUN if name in os.environ]
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if present and missing:
        raise UsageError(
            f"{', '.join(present)} set without {', '.join(missing)}: only a part of torchrun's environment. {_REMEDY}"
        )
    if present:
        _check_numbers()
    return bool(present)


def _check_numbers() -> None:
    """Check the numbers in torchrun's environment. Raises UsageError."""
    # With wrong numbers torch would wait half an hour for ranks that do not exist.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not re.fullmatch(r"\d{1,9}", os.environ[name]):
            raise UsageError(f"{name}={os.environ[name]}: must be a number. {_REMEDY}")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank >= world_size:
        raise UsageError(f"RANK={rank} with WORLD_SIZE={world_size}: ranks go from 0 to WORLD_SIZE - 1. {_REMEDY}")
    if int(os.environ["MASTER_PORT"]) > 65535:
        raise UsageError(f"MASTER_PORT={os.environ['MASTER_PORT']}: ports go up to 65535. {_REMEDY}")


def in_ray_program() -> bool:
    """Return whether Ray runs in this process, as a driver or a worker."""
    # A process that has not imported Ray has not started it, and the import takes a second.
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def given_s(started_s: float) -> float:
    """Return the Unix time at which the user gave the command.

    Args:
        started_s: Unix time at which this process started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return started_s
    # The user has started torchrun, the parent process, which imports torch before it starts a rank.
    return psutil.Process(os.getppid()).create_time()


def program() -> list[str]:
    """Return the arguments of Python that start this program again.

    They name main.py of a checkout, or the installed package.
    """
    if Path(sys.argv[0]).stem in ("steadfast", "__main__"):
        return ["-m", "steadfast"]
    return ["main.py"]
