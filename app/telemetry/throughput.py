"""The peak of the hardware that model FLOPs are measured against."""

import re

import torch

# Dense TFLOP/s (16 bit on tensor cores, fp32 without TF32, as PyTorch leaves it), from NVIDIA's data sheets
# (nvidia.com/en-us/data-center/<name>), halved where a sheet quotes 2:4 sparsity. Special forms come first.
_PEAKS = {
    "B200": (2250, 75),
    "H200 NVL": (835.5, 60),
    "H200": (989.4, 66.9),
    "H100 NVL": (835.5, 60),
    "H100 PCIe": (756, 51.2),
    "H100": (989.4, 66.9),
    "A100": (312, 19.5),
    "L40S": (362.05, 91.6),
    "L4": (121, 30.3),
    "A10": (125, 31.2),
    "A10G": (70, 35),
}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s that a device, named as by `torch.cuda`, can reach at most in `dtype`; None if unknown."""
    for name, (half, fp32) in _PEAKS.items():
        # Whole words: an A100 is no A10.
        if re.search(rf"\b{name}\b", device_name):
            teraflops = {torch.bfloat16: half, torch.float16: half, torch.float32: fp32}.get(dtype)
            return teraflops and teraflops * 1e12
    return None
