"""What a run ran on, for `environment.json`: enough to repeat it, and no secret."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def environment(directory: Path | None = None) -> dict[str, Any]:
    """Code revision of `directory` (default: here), versions and hardware of this host; None where unknown.

    Imports nothing heavy and makes no CUDA context, so that the driver too may call it.
    """
    torch = sys.modules.get("torch")  # its metadata do not say which CUDA it was built with
    return {
        "git": _git(str(directory or Path.cwd())),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "ray": _version("ray"),
        "cuda": torch.version.cuda if torch else None,
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": (_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines(),
    }


def _git(directory: str) -> dict[str, Any] | None:
    revision = _output("git", "-C", directory, "rev-parse", "HEAD")
    # Tracked files only: a run directory inside the clone does not make its code another.
    changes = _output("git", "-C", directory, "status", "--porcelain", "--untracked-files=no")
    return None if revision is None else {"revision": revision, "dirty": bool(changes)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints; None if it is missing, fails, or hangs as nvidia-smi may."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
