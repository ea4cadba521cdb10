"""The share of the steps' time in which a rank waits for data."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from torch import Tensor

from tests.support.drill import drill
from tests.support.small import Tokens, small

PAUSE_S = 0.01


class SlowTokens(Tokens):
    """Each sample takes its time, as one that comes from far away."""

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        time.sleep(PAUSE_S)
        return super().__getitem__(index)


def test_the_figure_is_what_the_dataset_takes(tmp_path: Path) -> None:
    words = ["data.target=tests.dist.test_data_wait:SlowTokens", "logging.every_steps=3", "run.steps=6"]
    drill(small(tmp_path, *words), worlds=[1])
    lines = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    for line in lines:
        step_s = 13 / line["samples_per_s"]  # a step has 13 samples
        waited_s = line["data_wait"] * step_s
        assert waited_s == pytest.approx(13 * PAUSE_S, rel=0.3)
        assert waited_s >= 13 * PAUSE_S
        assert line["data_wait"] < 1
