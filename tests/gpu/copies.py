"""Copies of a sharded state in the memory of the machine, where the size of a shard changes."""

import os
from statistics import median

import torch

from steadfast.checkpoint.memory_server import server_name
from steadfast.checkpoint.node_memory import Label, SharedMemory, SnapshotId
from tests.gpu.ceilings import now_s
from tests.gpu.scene import Scene

_COPIES = 4  # of each size, which take turns in two buffers


def node_memory(scene: Scene) -> None:
    """Copy a rank's part of a state to pinned memory of the machine, in worlds of 4, 3 and 4 ranks, twice.

    Asserts that each copy has the bytes of the device and the digest that the machine's process has of it, that its
    memory is pinned, and that a kernel runs after it. Figures: GB of a part of four, median GB/s of a copy.
    """
    state_bytes = 2**30 if scene.on_gpu else 2**24
    device = torch.device("cuda", 0) if scene.on_gpu else torch.device("cpu")
    memory = SharedMemory(server_name(str(scene.folder), "drill"), os.getpid(), 10.0, device)
    rates: list[float] = []
    try:
        for attempt, num_ranks in enumerate((4, 3, 4, 3, 4), 1):
            for step in range(1, _COPIES + 1):
                snapshot = SnapshotId(step, attempt, num_ranks)
                rates.append(_copy(scene, memory, device, snapshot, state_bytes // num_ranks))
    finally:
        memory.end()
    scene.figure(part_gb=state_bytes / 4 / 1e9, copy_gb_s=median(rates))


def _copy(scene: Scene, memory: SharedMemory, device: torch.device, snapshot: SnapshotId, num_bytes: int) -> float:
    """Copy a part, check the copy, and return its GB/s."""
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    buffer = memory.take(num_bytes)
    began_s = now_s(scene)
    buffer.bytes[:num_bytes].copy_(source, non_blocking=True)
    seconds = now_s(scene) - began_s
    assert buffer.number is not None
    memory.commit(buffer, Label(snapshot, "drill", ((0, 0, num_bytes),)))
    memory.keep([snapshot])

    matrix = torch.eye(512, device=device)
    scene.check(torch.equal(matrix @ matrix, matrix), f"{snapshot}: the device computes wrongly after a copy")
    scene.check_on_gpu(buffer.bytes.is_pinned(), f"{snapshot}: the memory is not pinned")
    same = torch.equal(memory.open(buffer.number)[:num_bytes], source.cpu())
    scene.check(same, f"{snapshot}: the copy is not what lies on the device")
    memory.verify(buffer.number)
    return num_bytes / seconds / 1e9
