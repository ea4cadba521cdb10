"""What the drills ran on."""

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NONE = "none"


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of a process that imports this code, with more of the caller's."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **variables}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON; none if it is not there, and not the one that is being written."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def missing(device: str) -> str:
    """Return what this interpreter lacks for drills on `device`; "" if it lacks nothing."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} cannot import torch ({error})"
    if device == "cuda" and not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees no CUDA device"
    return ""


def describe(commit: str = "") -> dict[str, str]:
    """Return date, machine and commit for the table; `commit` where this copy of the code has no git."""
    import torch

    from tests.gpu.older_torch import IS_ADAPTED

    on_gpu = torch.cuda.is_available()
    return {
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        "commit": commit or _commit(),
        "GPU": torch.cuda.get_device_name(0) if on_gpu else NONE,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or NONE,
        "torch": torch.__version__ + (", FSDP adapted by older_torch.py" if IS_ADAPTED else ""),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else NONE,
        "cuDNN": str(torch.backends.cudnn.version() or NONE),
        "Triton": _version("triton"),
        "gcc": _output("gcc", "-dumpfullversion") or NONE,
        "python": platform.python_version(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
    }


def missing_for_compile(on_gpu: bool) -> str:
    """Return what torch.compile lacks here; "" if it lacks nothing."""
    lacking = [name for name in ("gcc", "g++") if not shutil.which(name)]
    if on_gpu and _version("triton") == NONE:
        lacking.append("triton")
    return ", ".join(lacking)


def _commit() -> str:
    described = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*")
    return described or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return NONE


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _output(*command: str) -> str:
    """Return the first line that a command prints; "" if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]
