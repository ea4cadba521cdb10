"""Peak FLOP/s of GPUs, as the reference for model FLOPs utilization (MFU)."""

import re
from collections.abc import Sequence

import torch

from steadfast.world.device import Gpu

# Dense TFLOP/s of two kinds. The first is 16 bit on tensor cores with sums in fp32: bf16, or fp16 on a GPU without
# bf16. The second is fp32 without tensor cores. Sources are NVIDIA's data sheets
# (nvidia.com/en-us/data-center/<name>), halved if a sheet quotes 2:4 sparsity, and for GeForce and RTX the appendices
# of the white papers "NVIDIA Ampere GA102", "NVIDIA Ada GPU Architecture" and "NVIDIA RTX Blackwell GPU Architecture".
_PEAKS: dict[str, tuple[float, float]] = {
    "T4": (65, 8.1),
    "V100": (125, 15.7),
    "V100-PCIE": (112, 14),
    "V100S": (130, 16.4),
    "A10": (125, 31.2),
    "A10G": (70, 35),
    "A30": (165, 10.3),
    "A40": (149.7, 37.4),
    "A100": (312, 19.5),
    "L4": (121, 30.3),
    "L40": (181.05, 90.5),
    "L40S": (362.05, 91.6),
    "H100": (989.4, 66.9),
    "H100 PCIe": (756, 51.2),
    "H100 NVL": (835.5, 60),
    "H200": (989.4, 66.9),
    "H200 NVL": (835.5, 60),
    "GH200": (989.4, 66.9),
    "B200": (2250, 75),
    "GB200": (2500, 80),
    "B300": (2250, 75),
    "RTX 3080": (59.5, 29.8),
    "RTX 3090": (71, 35.6),
    "RTX 3090 Ti": (80, 40),
    "RTX 4080": (97.5, 48.7),
    "RTX 4080 SUPER": (104.4, 52.2),
    "RTX 4090": (165.2, 82.6),
    "RTX 5080": (112.6, 56.3),
    "RTX 5090": (209.5, 104.8),
    "RTX A4000": (76.7, 19.2),
    "RTX A5000": (111.1, 27.8),
    "RTX A6000": (154.8, 38.7),
    "RTX 6000 Ada Generation": (364.2, 91.1),
}
_WITHOUT_TF32 = ("T4", "V100", "V100-PCIE", "V100S")
# Longer names are tried first, because "H100" is also a part of the name "H100 PCIe".
_LONGEST_FIRST = sorted(_PEAKS, key=len, reverse=True)
# Devices that are slower than the card in their name: slices of a GPU ("A100-SXM4-80GB MIG 1g.10gb", "A10-8Q"), and
# laptop, Max-Q and D variants.
_LESSER = re.compile(r"\bMIG\b|-\d+[A-Z]$|\bLaptop\b|\bMax-Q\b| D$")


def peak_flops(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the peak FLOP/s of a device, None if unknown.

    Args:
        device_name: the name that `torch.cuda` reports.
        dtype: the dtype of the factors of matrix products. For bf16 on a GPU without bf16 the peak of fp16 counts.
        tf32: whether products in fp32 are rounded to TF32. On a GPU with TF32 their peak is half of that of bf16.
    """
    if _LESSER.search(device_name):
        return None
    for name in _LONGEST_FIRST:
        # Only whole words match, because "A10" is also a part of "A100".
        if re.search(rf"\b{name}\b", device_name):
            half, fp32 = _PEAKS[name]
            if tf32 and name not in _WITHOUT_TF32:
                fp32 = half / 2
            teraflops = {torch.bfloat16: half, torch.float16: half, torch.float32: fp32}.get(dtype)
            return teraflops and teraflops * 1e12
    return None


def total_peak_flops(gpus: Sequence[Gpu], dtype: torch.dtype, tf32: bool) -> float | None:
    """Return the sum of the peak FLOP/s of all ranks' GPUs.

    The result is None if the peak of any GPU is unknown, or if there are no GPUs.
    """
    total = 0.0
    for gpu in gpus:
        peak = peak_flops(gpu.name, dtype, tf32)
        if peak is None:
            return None
        total += peak
    return total or None
