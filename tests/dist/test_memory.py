"""What `plan` says of memory is what workers hold."""

from __future__ import annotations

import pytest

from tests.benchmarks.memory import SIZES, compare, config_of


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_memory_of_a_worker_is_known_before_the_run(strategy: str) -> None:
    found = compare(config_of(next(iter(SIZES)), strategy, num_workers=2))
    assert found.ratio == pytest.approx(1.0, abs=0.15)
