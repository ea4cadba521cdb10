"""What a run ran on, for `environment.json`: enough to repeat it, and no secret."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def environment(directory: Path | None = None) -> dict[str, Any]:
    """Code revision of `directory` (default: here), versions and hardware of this host; None where unknown.

    Imports nothing heavy and makes no CUDA context, so that the driver too may call it.
    """
    describe = ("git", "-C", str(directory or Path.cwd()), "describe", "--always", "--abbrev=40", "--exclude=*")
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "git": _output(*describe, "--dirty"),  # tracked files only: a run directory inside the clone is no change
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": version("ray"),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "gpus": gpus.splitlines() if gpus else [],
    }


def _output(*command: str) -> str | None:
    """What a command prints; None if it is missing, fails, or hangs as nvidia-smi may."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
