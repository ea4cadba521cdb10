"""Whether this node's NVIDIA driver is new enough for the installed torch. Exits with 1 if it is not."""

from __future__ import annotations

import subprocess
import sys

# By the major version of CUDA that torch is built with; see "CUDA Minor Version Compatibility" by NVIDIA.
LEAST = {12: 525, 13: 580}


def problem(driver: str, cuda: str | None) -> str:
    """Return what is wrong with a driver for a torch that is built with `cuda`, "" if nothing is."""
    major = int((cuda or "0").partition(".")[0])
    least = LEAST.get(major, 0)
    if not driver or int(driver.partition(".")[0]) >= least:
        return ""
    return f"driver {driver} cannot run this torch, whose CUDA {cuda} needs {least} or newer. Take a newer image"


def main() -> int:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver, *_ = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError, ValueError):
        return 0  # a node without a GPU, such as the head
    import torch

    found = problem(driver, torch.version.cuda)
    print(found or f"driver {driver}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
