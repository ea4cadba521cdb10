"""The scale of losses in fp16, beside the one of torch.amp."""

from __future__ import annotations

import math
import random

import torch
from torch import nn

from steadfast.config import parse_config
from steadfast.parallel.precision import build_precision

CPU = torch.device("cpu")


def test_it_shrinks_and_grows_as_gradscaler_does() -> None:
    config = parse_config("precision: {kind: fp16, loss_scale: {initial: 1024, factor: 2, window: 3}}")
    precision = build_precision(config.precision, CPU)
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


def test_at_a_scale_of_one_what_is_not_finite_is_no_overflow() -> None:
    config = parse_config("precision: {kind: fp16, loss_scale: {initial: 4, factor: 2}}")
    precision = build_precision(config.precision, CPU)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    found = [precision.update(optimizer, torch.tensor(math.nan)) for _ in range(3)]
    assert found == [True, True, False]
