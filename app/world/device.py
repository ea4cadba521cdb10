"""The device of this process: which one it is, how it computes, and what the GPUs of the other ranks are."""

import os
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from app.errors import UsageError

_CPU = torch.device("cpu")

# What makes sums come out in the same order each time. cuBLAS: a workspace of its own for each stream (its manual,
# "Results reproducibility"). NCCL: one algorithm and protocol whatever the message's size; the switch of NVLink SHARP
# adds in the order in which data arrive. Read when a library is first used, which is long after a worker has begun.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}


class Gpu(NamedTuple):
    """What the other ranks have to know of a rank's GPU."""

    name: str  # as `torch.cuda.get_device_name` gives it
    has_bf16: bool  # in hardware: a T4 or V100 only emulates it, slower than fp32


def assigned_device(gpu_ids: Sequence[object]) -> torch.device:
    """Return the GPU that Ray has assigned to this process, the CPU if it has assigned none."""
    # It is not enough to ask torch: from a worker without a GPU, Ray does not hide those of its machine.
    if not gpu_ids or not torch.cuda.is_available():
        return _CPU
    # Ray shows a worker just the one that is its own, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    own, visible = str(gpu_ids[0]), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if own in visible:
        return _current(visible.index(own))
    return _current(int(own) if own.isdigit() and int(own) < torch.cuda.device_count() else 0)


def torchrun_device(wanted: Literal["auto"] | int) -> torch.device:
    """Return the device of a rank that torchrun has started, where `scaling.gpus_per_worker` is `wanted`.

    Raises:
        UsageError: this machine has fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == 0 or (wanted == "auto" and num_gpus == 0):
        return _CPU
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_ranks > num_gpus:
        raise UsageError(
            f"torchrun has started {num_ranks} rank(s) on this machine, which has {num_gpus} GPU(s): each needs one of "
            "its own. Lower --nproc-per-node, or train on the CPU with scaling.gpus_per_worker=0"
        )
    return _current(int(os.environ.get("LOCAL_RANK", "0")))


def _current(index: int) -> torch.device:
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def cores_of_a_worker() -> int:
    """Return how many of this machine's cores there are for each of the workers that train on its GPUs, at least 1."""
    num_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not num_workers:
        # Not asked of torch: Ray shows a worker no GPU but its own.
        num_workers = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_workers))


def set_numerics(tf32: bool, deterministic: bool, num_threads: int | None = None) -> None:
    """Set how this process computes, before its first product and its first collective.

    Args:
        tf32: round the factors of fp32 products to 10 bits, on tensor cores.
        deterministic: give the same bits each time. A variable of `DETERMINISTIC` that the user has set stays his.
        num_threads: of a CPU, among which sums are divided; None leaves it to the environment.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    # By the older names, which torch keeps in step with the newer `fp32_precision`. After setting those, both
    # `torch.get_float32_matmul_precision` and `torch.backends.cudnn.flags` raise, and a user's code may call them.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32  # which torch would leave on for convolutions
    if deterministic:
        for name, value in DETERMINISTIC.items():
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def variables_kept() -> tuple[str, ...]:
    """Return the variables of `DETERMINISTIC` that the user has set otherwise, as NAME=VALUE."""
    return tuple(f"{name}={os.environ[name]}" for name in DETERMINISTIC if os.environ.get(name) != DETERMINISTIC[name])


def gather_gpus(device: torch.device, size: int, control: dist.ProcessGroup) -> tuple[Gpu, ...]:
    """Return the GPU of every rank, () where a world trains on CPUs. A collective on GPUs."""
    if device.type != "cuda":
        return ()
    own = Gpu(torch.cuda.get_device_name(device), torch.cuda.is_bf16_supported(including_emulation=False))
    gpus: list[Any] = [None] * size
    dist.all_gather_object(gpus, own, group=control)
    return tuple(gpus)
