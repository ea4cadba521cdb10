"""Peak FLOPs of GPUs by name and format, and of a world of GPUs."""

import pytest
import torch

from steadfast.telemetry.throughput import peak_flops, total_peak_flops
from steadfast.world.device import Gpu


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A10", torch.bfloat16, 125),
        ("NVIDIA A10G", torch.bfloat16, 70),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 NVL", torch.float32, 60),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.float16, 362.05),
        ("NVIDIA L40", torch.bfloat16, 181.05),
        ("NVIDIA H200", torch.float64, None),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.4),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("Tesla T4", torch.float32, 8.1),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, 125),
        ("Tesla V100-PCIE-32GB", torch.float16, 112),
        ("Tesla V100S-PCIE-32GB", torch.float16, 130),
        ("NVIDIA GeForce RTX 3090 Ti", torch.bfloat16, 80),
        ("NVIDIA GeForce RTX 4090", torch.float32, 82.6),
        ("NVIDIA RTX 6000 Ada Generation", torch.bfloat16, 364.2),
        # A part of a GPU, and slower ones of nearly the same name.
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16, None),
        ("NVIDIA A10-8Q", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, None),
        ("NVIDIA GeForce GTX 1080", torch.float32, None),
    ],
)
def test_peak_flops(name: str, dtype: torch.dtype, teraflops: float | None) -> None:
    assert peak_flops(name, dtype) == (teraflops and pytest.approx(teraflops * 1e12))


@pytest.mark.parametrize(
    ("name", "teraflops"), [("NVIDIA A100-SXM4-80GB", 156), ("NVIDIA L4", 60.5), ("Tesla V100-PCIE-32GB", 14)]
)
def test_tf32_has_a_peak_of_its_own_where_a_gpu_has_it(name: str, teraflops: float) -> None:
    assert peak_flops(name, torch.float32, tf32=True) == pytest.approx(teraflops * 1e12)
    assert peak_flops(name, torch.float16, tf32=True) == peak_flops(name, torch.float16)


def test_the_peak_of_a_world_is_the_sum_of_all_its_gpus_and_unknown_if_one_is() -> None:
    a100, l4, unheard_of = Gpu("NVIDIA A100-SXM4-40GB", True), Gpu("NVIDIA L4", True), Gpu("NVIDIA Z1", True)
    assert total_peak_flops((a100, l4, l4), torch.bfloat16, tf32=False) == pytest.approx((312 + 2 * 121) * 1e12)
    assert total_peak_flops((a100, unheard_of), torch.bfloat16, tf32=False) is None
    assert total_peak_flops((), torch.bfloat16, tf32=False) is None
