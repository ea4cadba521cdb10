"""Description of the machine, code and versions of a run, for `environment.json`.

It holds enough to repeat the run, and no secrets.
"""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def environment(directory: Path | None = None) -> dict[str, Any]:
    """Return code revision, versions and hardware; unknown entries are None.

    Args:
        directory: a directory of the code, by default the current one.
    """
    # The command calls this before any worker exists, so it imports no heavy package and makes no CUDA context.
    # With all tags excluded, git describes a commit by its hash alone.
    describe = ("git", "-C", str(directory or Path.cwd()), "describe", "--always", "--abbrev=40", "--exclude=*")
    gpus = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "git": output_of(*describe, "--dirty"),  # looks at tracked files only: a run directory in the clone is ignored
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": ray_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "gpus": (gpus or "").splitlines(),
    }


def ray_version() -> str | None:
    """Return the version of Ray, None if Ray is not installed."""
    try:
        return version("ray")
    except PackageNotFoundError:  # runs under torchrun do not need Ray
        return None


def output_of(*command: str) -> str | None:
    """Return the output of a command, or None if the command fails.

    A missing command and a command that runs for more than ten seconds also count as failed.
    """
    # The time is limited because nvidia-smi may hang.
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
