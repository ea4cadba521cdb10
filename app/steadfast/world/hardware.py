"""Hardware of a rank, which determines rounding and identifies faulty parts."""

import contextlib
import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from steadfast.errors import UsageError

_ASK_S = 10.0  # time limit of nvidia-smi
_CPU_INFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")


class Hardware(NamedTuple):
    """Hardware of one rank; unknown fields are ""."""

    host: str
    device: str  # name of the GPU, else of the processor
    uuid: str = ""  # of the GPU
    serial: str = ""  # of the GPU's board; boards for desktops have none

    def __str__(self) -> str:
        known = [self.device, self.uuid]
        if self.serial:
            known.append(f"serial number {self.serial}")
        return f"host {self.host}, {', '.join(filter(None, known))}"


def kind_of(device: torch.device) -> str:
    """Return the kind of processor; ranks of one kind give equal bits."""
    # The order in which a sum is computed depends on the kind.
    if device.type == "cuda":
        # Libraries choose their kernels, and so the order of a sum, by these values.
        found = torch.cuda.get_device_properties(device)
        libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        return f"{found.name}, {found.multi_processor_count} SMs, {libraries}, driver {_driver()}"
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def refuse_mixed(kinds: Sequence[str]) -> None:
    """Refuse an exact run whose ranks have different kinds of hardware."""
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UsageError(
                f"run.exact: rank {rank} computes on {kind}, rank 0 on {kinds[0]}, which round differently. Use "
                "machines of one model and with the same libraries (scaling.label_selector), or set run.exact=false"
            )


def read_hardware(device: torch.device) -> Hardware:
    """Return the hardware of this process, within seconds."""
    host = socket.gethostname()
    if device.type != "cuda":
        return Hardware(host, _processor())
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return Hardware(host, torch.cuda.get_device_name(device), uuid, _serial(uuid))


def _serial(uuid: str) -> str:
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=serial", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # containers may lack nvidia-smi
        return ""
    # A board without a serial number answers "[N/A]".
    return "" if answer.startswith("[") else answer


def _driver() -> str:
    """Return the version of this machine's NVIDIA driver, "unknown" where the kernel does not tell it."""
    with contextlib.suppress(OSError):
        if found := re.search(r"Module .*?(\d+\.[\d.]+)", _DRIVER.read_text()):
            return found[1]
    return "unknown"


def _processor() -> str:
    """Return the name of this machine's processor."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return "cpu"
