"""Facts of a node before a run: versions, hardware, free space, limits, interfaces."""

import os
import resource
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from steadfast.checkpoint.memory_server import free_bytes
from steadfast.telemetry.environment import output_of, ray_version
from steadfast.world.groups import prefer_interface_of

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SHARED_MEMORY = "/dev/shm"
_DISCARD_PORT = 9


@dataclass(frozen=True)
class Space:
    """Space on a file system."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Gpu:
    """GPU with its memory. Sizes that the driver does not report are 0."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Interface:
    """Network interface with one of its IPv4 addresses."""

    name: str
    address: str
    is_up: bool
    mbit_per_s: int  # 0 if the driver does not report the speed


@dataclass(frozen=True)
class NodeFacts:
    """Facts of one node, as a worker on it would see them."""

    versions: dict[str, str]  # by package, such as Python and torch; missing packages are left out
    num_cpus: int
    gpus: tuple[Gpu, ...]
    device: str  # device of a worker on this node: cpu or cuda
    free_memory_bytes: int
    shared_memory: Space
    disks: tuple[Space, ...]
    num_open_files: int  # limit of open files for one process
    own_address: str  # address of the interface towards the head
    interfaces: tuple[Interface, ...]
    variables: dict[str, str]  # values of `INTERFACE_VARIABLES` that gloo and NCCL will read
    gpu_fault: str = ""  # why torch cannot use the GPU that Ray has assigned, and what to do


def gather_facts(head: str, storage: str, device: torch.device) -> NodeFacts:
    """Return the facts of this node.

    Args:
        head: the address of the cluster's head.
        storage: `run.storage`, a path or a URI.
        device: the device of this process.
    """
    driver, gpus = _gpus()
    own_address = _address_towards(head)
    # A worker sets these variables before it forms a group. Setting them here shows the values that a worker would use.
    prefer_interface_of(own_address)
    variables = {name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ}
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return NodeFacts(
        versions=_versions(driver),
        num_cpus=os.cpu_count() or 1,
        gpus=gpus,
        device=device.type,
        free_memory_bytes=free_bytes(),
        shared_memory=_space(Path(_SHARED_MEMORY)),
        disks=_disks(storage),
        num_open_files=soft_limit,
        own_address=own_address,
        interfaces=_interfaces(),
        variables=variables,
    )


def _versions(driver: str | None) -> dict[str, str]:
    nccl = None
    # A torch for CPUs cannot be asked for the version of NCCL.
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    found = {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": nccl,
        "driver": driver,
        "Ray": ray_version(),
    }
    return {name: version for name, version in found.items() if version}


def _gpus() -> tuple[str | None, tuple[Gpu, ...]]:
    """Return driver version and GPUs, None and () without NVIDIA's driver."""
    query = "--query-gpu=driver_version,name,memory.free,memory.total"
    driver = None
    gpus = []
    for line in (output_of("nvidia-smi", query, "--format=csv,noheader,nounits") or "").splitlines():
        driver, name, free_mib, total_mib = line.split(", ")
        gpus.append(Gpu(name, _bytes(free_mib), _bytes(total_mib)))
    return driver, tuple(gpus)


def _bytes(mib: str) -> int:
    # nvidia-smi prints [N/A] for a GPU that shares the host's memory.
    return int(mib) * 2**20 if mib.isdigit() else 0


def _disks(storage: str) -> tuple[Space, ...]:
    # Ray keeps logs and spilled objects below the temporary directory.
    paths = [Path(tempfile.gettempdir())]
    if "://" not in storage:
        paths.insert(0, _existing(Path(storage)))
    disks: dict[int, Path] = {}
    for path in paths:
        # Both paths are often on one disk, which is then listed once.
        disks.setdefault(path.stat().st_dev, path)
    return tuple(map(_space, disks.values()))


def _existing(path: Path) -> Path:
    """Return the path, or its deepest parent folder that exists."""
    while not path.is_dir():
        path = path.parent
    return path


def _space(path: Path) -> Space:
    usage = shutil.disk_usage(path)
    return Space(str(path), usage.free, usage.total)


def _address_towards(host: str) -> str:
    # Connecting a UDP socket sends nothing. The system only selects the interface.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _DISCARD_PORT))
        return str(probe.getsockname()[0])


def _interfaces() -> tuple[Interface, ...]:
    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            # `own_address` is an IPv4 address too. An interface to a container may have come between the two readings.
            if each.family == socket.AF_INET and name in stats:
                found.append(Interface(name, each.address, stats[name].isup, stats[name].speed))
    return tuple(found)
