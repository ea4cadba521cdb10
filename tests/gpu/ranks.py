"""Processes that play ranks on one device, and may be killed.

NCCL refuses two ranks of one host on one GPU. So each rank is told that it is a host of its own, and they talk over
loopback sockets: real communicators, remote errors and aborts, but neither NVLink nor shared memory.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.gpu import machine
from tests.gpu.machine import ROOT, read_lines
from tests.gpu.older_torch import adapt
from tests.gpu.scene import Scene

HOST = "127.0.0.1"
_POLL_S = 0.005

# How torch is told that a process outlives an abort of its communicators.
SURVIVABLE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}


def one_gpu_environment(rank: int) -> dict[str, str]:
    """Return the variables with which NCCL takes ranks on one GPU for hosts."""
    return {
        "NCCL_HOSTID": f"r{rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
    }


@dataclass
class Rank:
    """What a process knows of itself. `store` is the drill's own."""

    number: int
    size: int
    store: dist.Store
    device: torch.device
    folder: Path
    port: int
    args: dict[str, Any] = field(default_factory=dict)

    def note(self, **fields: Any) -> None:
        """Write a line down for the drill, also if this process is about to die."""
        with (self.folder / f"rank-{self.number}.jsonl").open("a") as lines:
            lines.write(json.dumps(fields) + "\n")

    def another_store(self) -> dist.Store:
        """Return a connection of its own to the store, on which a thread may wait."""
        return dist.TCPStore(HOST, self.port, None, False)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Ranks:
    """Starts and ends the ranks of a drill. As a context it leaves none behind."""

    def __init__(
        self, scene: Scene, target: str, size: int, args: dict[str, Any] | None = None, name: str = ""
    ) -> None:
        """`target`, "module:function", is called with a Rank in each process. `name` tells gangs of a drill apart."""
        self.folder = scene.folder / (name or target.partition(":")[2])
        self.folder.mkdir()
        self.store = dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
        self._scene = scene
        self._target, self._size, self._device, self._args = target, size, scene.device, args or {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int, **environment: str) -> None:
        """Start a rank, with more variables than the drill's own."""
        command = [sys.executable, "-m", "tests.gpu.ranks", self._target, str(number), str(self._size)]
        command += [str(self.store.port), self._device, str(self.folder), json.dumps(self._args)]
        own = one_gpu_environment(number) if self._device == "cuda" else {}
        with (self.folder / f"rank-{number}.txt").open("w") as log:
            env = machine.environment(**own, **environment)
            self.processes[number] = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)

    def start_all(self, **environment: str) -> Self:
        for number in range(self._size):
            self.start(number, **environment)
        return self

    def run(self, bound_s: float, **environment: str) -> dict[int, int]:
        """Start all ranks, and return their exit codes once all have ended or had to be killed."""
        with self.start_all(**environment):
            return self.wait(bound_s)

    def check_ended(self, codes: dict[int, int], numbers: Iterable[int] = (), what: str = "rank") -> None:
        """Check that ranks have ended well: these, or all."""
        for number in numbers or codes:
            claim = f"{what} {number} ended with {codes[number]}: {self.last_words(number)}"
            self._scene.check(codes[number] == 0, claim)

    def wait(self, bound_s: float) -> dict[int, int]:
        """Return the exit codes by rank once all have ended; -9 for one that had to be killed."""
        until_s = time.monotonic() + bound_s
        while self.living() and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        self.kill_all()
        return {number: process.returncode for number, process in self.processes.items()}

    def wait_for_death(self, number: int, bound_s: float) -> bool:
        """Return once a rank's process has ended; False if it lives on."""
        until_s = time.monotonic() + bound_s
        while self.processes[number].poll() is None and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return self.processes[number].poll() is not None

    def living(self) -> list[int]:
        return [number for number, process in self.processes.items() if process.poll() is None]

    def notes(self, number: int) -> list[dict[str, Any]]:
        """Return what a rank has written down so far."""
        return read_lines(self.folder / f"rank-{number}.jsonl")

    def last_words(self, number: int) -> str:
        """Return the end of a rank's output."""
        return " ".join((self.folder / f"rank-{number}.txt").read_text()[-300:].split())

    def kill_all(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()


def die() -> None:
    """End this process as a lost machine does."""
    os.kill(os.getpid(), signal.SIGKILL)


def form_plain(rank: Rank, size: int | None = None, generation: int = 0) -> dist.ProcessGroup:
    """Form groups as torch alone does: gloo by default, and one for device tensors, which is returned. A collective."""
    prefixed = dist.PrefixStore(f"plain-{generation}", rank.store)
    dist.init_process_group("gloo", store=prefixed, rank=rank.number, world_size=size or rank.size)
    group: dist.ProcessGroup = dist.new_group(backend="nccl" if rank.device.type == "cuda" else "gloo")
    return group


def form(rank: Rank, number: int, size: int, attempt: int, silence_s: float | None = None) -> Any:
    """Form a world of the app's, as the rank of that number. A collective."""
    from steadfast.world.groups import WorldRank
    from steadfast.world.runtime import WorkerProcess, form_world
    from steadfast.world.timeouts import Timeouts

    timeouts = Timeouts() if silence_s is None else Timeouts(silence_s)
    process = WorkerProcess(rank.device, timeouts=timeouts)
    return form_world(rank.store, WorldRank(number, size, attempt), process)


def sum_of_ones(rank: Rank, world: Any) -> float:
    """Return what one of each rank adds up to in a world of the app's. A collective."""
    ones = torch.ones(1024, device=rank.device)
    world.groups.communicator.sum(ones)
    world.groups.gate()
    return ones[0].item()


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("target", "number", "size", "port", "device", "folder", "args"):
        parser.add_argument(name)
    options = parser.parse_args()
    torch.set_num_threads(1)
    adapt()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    port = int(options.port)
    store = dist.TCPStore(HOST, port, None, False)
    folder, args = Path(options.folder), json.loads(options.args)
    rank = Rank(int(options.number), int(options.size), store, device, folder, port, args)
    module, _, name = options.target.partition(":")
    getattr(import_module(module), name)(rank)


if __name__ == "__main__":
    _main()
