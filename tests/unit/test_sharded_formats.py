"""In which formats fsdp gathers parameters and sums gradients."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from steadfast.config import FsdpConfig, PrecisionConfig
from steadfast.parallel import arrange, build_parallel
from steadfast.parallel.precision import build_precision
from steadfast.world.communicator import GlooCommunicator
from steadfast.world.groups import Groups
from steadfast.world.runtime import World

CPU = torch.device("cpu")


class Watched(nn.Linear):
    """Notes the format of its weight in a forward."""

    seen: torch.dtype | None = None

    def forward(self, input: Tensor) -> Tensor:
        self.seen = self.weight.dtype
        return super().forward(input)


@pytest.mark.parametrize(
    ("precision", "section", "gathered", "summed"),
    [
        ("fp32", {}, torch.float32, torch.float32),
        ("bf16", {}, torch.bfloat16, torch.float32),
        ("fp16", {}, torch.float16, torch.float32),
        ("bf16", {"reduce_dtype": "bf16"}, torch.bfloat16, torch.bfloat16),
        ("bf16", {"param_dtype": "fp32"}, torch.float32, torch.float32),
        ("fp32", {"param_dtype": "bf16", "reduce_dtype": "fp32"}, torch.bfloat16, torch.float32),
        ("fp64", {}, torch.float64, torch.float64),
    ],
)
def test_formats_follow_the_precision_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch, precision: str, section: dict[str, str], gathered: torch.dtype, summed: torch.dtype
) -> None:
    sums: list[torch.dtype] = []
    honest = dist.reduce_scatter_single

    def noted(output: Tensor, input: Tensor, *args: object, **named: object) -> object:
        sums.append(input.dtype)
        return honest(output, input, *args, **named)

    monkeypatch.setattr(dist, "reduce_scatter_single", noted)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        group = dist.group.WORLD
        assert group is not None
        config = FsdpConfig.model_validate(section)
        numerics = build_precision(PrecisionConfig.model_validate({"kind": precision}), CPU)
        communicator = GlooCommunicator(group, threading.Event())
        groups = Groups(group, communicator, FakeStore(), {}, threading.Event())
        parallel = build_parallel(config, arrange(World(0, 2, 0, groups), config), numerics)
        layer = Watched(4, 4)
        model = parallel.wrap(numerics.convert(nn.Sequential(layer)))
        with parallel.synchronize(model, last=True):
            model(torch.ones(2, 4, dtype=numerics.param_dtype)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert layer.seen == gathered
    assert set(sums) == {summed}
