"""What the device itself reaches: everything else is relative to it."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from tests.gpu.machine import missing_for_compile
from tests.gpu.scene import Scene

_REPEATS = 10


def measure(scene: Scene) -> None:
    """Time a product of random matrices, and copies within the device, to it and from it.

    Asserts that the product is right: exact on small integers, which every format here holds.
    Figures: TFLOP/s of a bf16 product of 8192^3 (fp32, 512^3 on the CPU), GB/s of copies of 1 GiB (64 MiB there),
    and what is missing for torch.compile.
    """
    size, dtype = (8192, torch.bfloat16) if scene.on_gpu else (512, torch.float32)
    a = torch.randint(0, 2, (size, size), device=scene.device).to(dtype)
    identity = torch.eye(size, device=scene.device, dtype=dtype)
    scene.check(torch.equal(a @ identity, a), "a product with the identity is not what was multiplied")
    # Zeros and ones draw less power, and so are multiplied faster than the numbers of a model.
    factor = torch.randn((size, size), device=scene.device).to(dtype)
    seconds = _time(lambda: factor @ factor, scene)
    scene.figure(matmul_tflops=2 * size**3 / seconds / 1e12)

    num_bytes = 2**30 if scene.on_gpu else 2**26
    here = torch.ones(num_bytes, dtype=torch.uint8, device=scene.device)
    there = torch.empty_like(here)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=scene.on_gpu)
    copies: dict[str, tuple[Tensor, Tensor]] = {
        "device_copy_gb_s": (there, here),
        "to_host_gb_s": (host, here),
        "to_device_gb_s": (there, host),
    }
    for name, (target, source) in copies.items():
        copy_s = _time(partial(target.copy_, source, non_blocking=True), scene)
        scene.figure(**{name: num_bytes / copy_s / 1e9})
    scene.figure(missing_for_compile=missing_for_compile(scene.on_gpu) or "nothing")


def _time(act: Callable[[], object], scene: Scene) -> float:
    """Return the median seconds of an act, by the wall clock around a device that is empty before and after."""
    seconds = []
    for _ in range(_REPEATS + 2):
        began_s = now_s(scene)
        act()
        seconds.append(now_s(scene) - began_s)
    return median(seconds[2:])


def now_s(scene: Scene) -> float:
    """Return the time at which the device has done all that it was given."""
    if scene.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
