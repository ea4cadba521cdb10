"""Device of this process: selection, numerics, and the GPUs of all ranks."""

import os
import re
import socket
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from steadfast.errors import GpuUnusable, UsageError
from steadfast.world.groups import probe

_CPU = torch.device("cpu")

# Settings that make sums repeat in the same order. cuBLAS: a separate workspace for each stream (its manual, "Results
# reproducibility"). NCCL: one algorithm and protocol for all message sizes; the switch of NVLink SHARP would add in the
# order of arrival. The libraries read them at their first use, long after a worker has begun.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}


class Gpu(NamedTuple):
    """Properties of a rank's GPU that all ranks need."""

    name: str  # from `torch.cuda.get_device_name`
    has_bf16: bool  # in hardware: a T4 or V100 only emulates it, slower than fp32


def assigned_device(gpu_ids: Sequence[object]) -> torch.device:
    """Return the GPU that Ray has assigned, or the CPU. `started` follows."""
    # torch alone does not know: Ray does not hide a machine's GPUs from a worker without a GPU.
    if not gpu_ids:
        return _CPU
    # Ray shows a worker only its own GPU, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    own, visible = str(gpu_ids[0]), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if own in visible:
        return torch.device("cuda", visible.index(own))
    if own.isdigit() and int(own) < torch.cuda.device_count():
        return torch.device("cuda", int(own))
    return torch.device("cuda", 0)


def torchrun_device(wanted: Literal["auto"] | int) -> torch.device:
    """Return the device of a rank under torchrun.

    Args:
        wanted: the configured `scaling.gpus_per_worker`.

    Raises:
        UsageError: this machine has fewer GPUs than ranks.
        GpuUnusable: torch cannot use the GPU.
    """
    has_gpus = torch.cuda.is_available()
    offered = torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and _num_gpus()
    if wanted == 0 or (wanted == "auto" and not (has_gpus or offered)):
        return _CPU
    num_gpus = torch.cuda.device_count()
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if has_gpus and num_ranks > num_gpus:
        raise UsageError(
            f"torchrun has started {num_ranks} rank(s) on this machine, which has {num_gpus} GPU(s): each rank needs a "
            "GPU of its own. Lower --nproc-per-node, or train on the CPU with scaling.gpus_per_worker=0"
        )
    return started(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))


def started(device: torch.device) -> torch.device:
    """Return the device. A GPU is made the current one, and computes once.

    Raises GpuUnusable with torch's own sentence.
    """
    if device.type != "cuda":
        return device
    try:
        torch.cuda.init()  # `set_device` of a torch for CPUs lacks the sentence
        torch.cuda.set_device(device)
        probe(device)
        return device
    except (AssertionError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(". ")
        raise GpuUnusable(
            f"{socket.gethostname()}: torch {torch.__version__} cannot use the GPU: {reason}. Look at nvidia-smi there "
            "and whether the driver is new enough for this torch, or train on the CPU with scaling.gpus_per_worker=0"
        ) from error


def _num_gpus() -> int:
    # Not from torch, because Ray shows a worker only its own GPU, and a driver may not start.
    return sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))


def cores_of_a_worker() -> int:
    """Return this machine's cores per worker, at least 1.

    The number of workers is torchrun's, or else the number of this machine's GPUs.
    """
    num_workers = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or _num_gpus()
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_workers))


def set_numerics(tf32: bool, deterministic: bool, num_threads: int | None = None) -> None:
    """Set the numerics of this process, before its first product and collective.

    Args:
        tf32: round the factors of fp32 products to 10 bits, on tensor cores.
        deterministic: give the same bits each time. Variables of `DETERMINISTIC` that the user has set keep their
            values.
        num_threads: number of CPU threads, which sums are divided among; None leaves it to the environment.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    # The older names are used, which torch keeps consistent with the newer `fp32_precision`. After the newer ones are
    # set, `torch.get_float32_matmul_precision` and `torch.backends.cudnn.flags` raise, and user code may call them.
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32  # torch's default leaves it on for convolutions
    if deterministic:
        for name, value in DETERMINISTIC.items():
            os.environ.setdefault(name, value)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def variables_kept() -> tuple[str, ...]:
    """Return the user's deviations from `DETERMINISTIC`, as NAME=VALUE."""
    kept: list[str] = []
    for name, default in DETERMINISTIC.items():
        if os.environ.get(name) != default:
            kept.append(f"{name}={os.environ[name]}")
    return tuple(kept)


def gather_gpus(device: torch.device, size: int, control: dist.ProcessGroup) -> tuple[Gpu, ...]:
    """Return every rank's GPU, () on CPUs. A collective on GPUs."""
    if device.type != "cuda":
        return ()
    own = Gpu(torch.cuda.get_device_name(device), torch.cuda.is_bf16_supported(including_emulation=False))
    gpus: list[Any] = [None] * size
    dist.all_gather_object(gpus, own, group=control)
    return tuple(gpus)
