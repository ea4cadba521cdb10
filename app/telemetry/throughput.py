"""How much of the hardware is used: model FLOPs against the peak that the vendor's data sheet gives."""

import re

import torch

# Dense TFLOP/s (16 bit on tensor cores, fp32 without TF32, as PyTorch leaves it), from NVIDIA's data sheets
# (nvidia.com/en-us/data-center/<name>), halved where a sheet quotes 2:4 sparsity.
_PEAKS = {
    "B200": (2250, 75),
    "H200": (989.4, 66.9),
    "H200 NVL": (835.5, 60),
    "H100": (989.4, 66.9),
    "H100 NVL": (835.5, 60),
    "H100 PCIe": (756, 51.2),
    "A100": (312, 19.5),
    "L40S": (362.05, 91.6),
    "L4": (121, 30.3),
    "A10": (125, 31.2),
    "A10G": (70, 35),
    "V100": (125, 15.7),
    "T4": (65, 8.1),
}
_WITHOUT_BF16 = {"V100", "T4"}  # Volta and Turing run bf16 in software: no peak to compare with


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s that one device can reach at most in `dtype`; None where no honest figure is known.

    `device_name` as `torch.cuda.get_device_name()` gives it. Whole words are compared: an A100 is no A10.
    """
    words = re.split(r"[\s-]+", device_name)
    name = next((word for word in words if word in _PEAKS), "")
    form = next((f"{name} {word}" for word in words if f"{name} {word}" in _PEAKS), name)
    # A MIG slice has a slice of the peak, and its name does not say which.
    if form not in _PEAKS or "MIG" in words or (dtype is torch.bfloat16 and name in _WITHOUT_BF16):
        return None
    half, fp32 = _PEAKS[form]
    teraflops = {torch.bfloat16: half, torch.float16: half, torch.float32: fp32}.get(dtype)
    return teraflops and teraflops * 1e12


def mfu(samples_per_s: float, flops_per_sample: float | None, peak_flops_total: float | None) -> float | None:
    """Model FLOPs utilisation, 0 to 1 (PaLM, arXiv:2204.02311, appendix B); recomputation is not counted."""
    if not flops_per_sample or not peak_flops_total:
        return None
    return samples_per_s * flops_per_sample / peak_flops_total
