"""Formats: of a world's computation, of each part of a model, and the scale of losses in fp16."""

import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from steadfast.config.schema import PrecisionConfig
from steadfast.parallel.precision import LossScale, Precision, build_precision
from steadfast.world.device import Gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
L4, T4 = Gpu("NVIDIA L4", True), Gpu("Tesla T4", False)


def test_it_shrinks_and_grows_as_gradscaler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossScale, "initial", 1024.0)
    monkeypatch.setattr(LossScale, "window", 3)
    precision = build_precision(PrecisionConfig(kind="fp16"), CPU)
    weight, same = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    ours, theirs = torch.optim.SGD([weight], 0.1), torch.optim.SGD([same], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    chance = random.Random(1)
    for _ in range(200):
        overflows = chance.random() < 0.2
        for param in (weight, same):
            param.grad = torch.full((1,), math.inf if overflows else 1.0)
        scaler.scale(torch.ones(()))
        scaler.step(theirs)
        scaler.update()
        assert precision.update(ours, weight.grad.norm() if weight.grad is not None else torch.zeros(())) == overflows
        assert float(precision.loss_scale) == scaler.get_scale()
        assert weight.isfinite()


def test_at_a_scale_of_one_what_is_not_finite_is_no_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossScale, "initial", 4.0)
    precision = build_precision(PrecisionConfig(kind="fp16"), CPU)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    found = [precision.update(optimizer, torch.tensor(math.nan)) for _ in range(3)]
    assert found == [True, True, False]


@pytest.mark.parametrize(
    ("kind", "gpus", "dtype"),
    [
        ("auto", (), torch.float32),
        ("auto", (L4, L4), torch.bfloat16),
        ("auto", (L4, T4), torch.float32),
        ("bf16", (L4, T4), torch.bfloat16),
        ("fp32", (L4, L4), torch.float32),
        ("fp64", (L4, L4), torch.float64),
    ],
)
def test_a_world_computes_in_what_all_its_gpus_have(kind: Any, gpus: tuple[Gpu, ...], dtype: torch.dtype) -> None:
    precision, before = (build_precision(PrecisionConfig(kind=kind), CUDA, each) for each in (gpus, ()))
    assert precision.compute_dtype == dtype
    assert precision.param_dtype == before.param_dtype, "the format of parameters is known before the world"


def with_frozen_base() -> nn.Module:
    base = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16).requires_grad_(False)
    return nn.ModuleDict({"base": base, "head": nn.Linear(4, 2, dtype=torch.bfloat16)})


def dtypes(model: nn.Module) -> dict[str, set[torch.dtype]]:
    found: dict[str, set[torch.dtype]] = {}
    for name, tensor in model.state_dict().items():
        found.setdefault(name.partition(".")[0], set()).add(tensor.dtype)
    return found


def test_a_frozen_part_keeps_its_own_format_unless_results_are_to_be_equal() -> None:
    expected = {"base": {torch.bfloat16, torch.int64}, "head": {torch.float32}}
    assert dtypes(Precision(CPU).convert(with_frozen_base())) == expected
    expected = {"base": {torch.float64, torch.int64}, "head": {torch.float64}}
    assert dtypes(Precision(CPU, torch.float64).convert(with_frozen_base())) == expected


def test_a_part_that_trains_takes_its_buffers_along_and_stays_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to(torch.bfloat16)
    model[2].weight = model[0].weight
    single = {torch.float32}
    assert dtypes(Precision(CPU).convert(model)) == {"0": single, "1": {*single, torch.int64}, "2": single}
    assert model[2].weight is model[0].weight
