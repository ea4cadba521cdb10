"""What a run ran on, for `environment.json`: enough to repeat it, and no secret."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment(directory: Path | None = None) -> dict[str, Any]:
    """Return the code revision of `directory` (default: here), versions and hardware; None where unknown."""
    # Nothing heavy is imported, and no CUDA context made: the driver calls this, before there is any worker.
    describe = ("git", "-C", str(directory or Path.cwd()), "describe", "--always", "--abbrev=40", "--exclude=*")
    gpus = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "git": output_of(*describe, "--dirty"),  # tracked files only: a run directory inside the clone is no change
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": ray_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "gpus": (gpus or "").splitlines(),
    }


def ray_version() -> str | None:
    """Return the version of Ray, None where it is not installed."""
    try:
        return version("ray")
    except PackageNotFoundError:  # torchrun does without
        return None


def output_of(*command: str) -> str | None:
    """Return what a command prints; None if it is missing, fails, or hangs as nvidia-smi may."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
