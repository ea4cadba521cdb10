"""Which random numbers a microbatch draws: those of its seed, step and place in the grid, on any rank."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import torch

from steadfast.loop.seed import seed_generators
from steadfast.plan import Microbatch


def test_generators_differ_for_each_seed_step_and_microbatch_and_repeat_for_the_same() -> None:
    drawn: list[list[float]] = []
    for start in (0, 7):
        for seed, step, index in product(range(3), range(1, 4), range(3)):
            seed_generators(seed, Microbatch(step, index, start, start + 2), torch.device("cpu"))
            drawn.append([float(torch.rand(())), random.random(), float(np.random.random())])
    assert drawn[:27] == drawn[27:]
    assert [len(set(numbers)) for numbers in zip(*drawn, strict=True)] == [27] * 3
