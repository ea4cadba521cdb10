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
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "git": _output(*describe, "--dirty"),  # tracked files only: a run directory inside the clone is no change
        "python": platform.python_version(),
        "torch": _version("torch"),
        "ray": _version("ray"),  # under torchrun nobody needs it
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "gpus": (gpus or "").splitlines(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Return what a command prints; None if it is missing, fails, or hangs as nvidia-smi may."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
