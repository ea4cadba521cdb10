"""The learning rate, which is a pure function of the step."""

import pytest

from app.components.schedule import learning_rate
from app.config import ConstantConfig, CosineConfig, ScheduleConfig

COSINE = CosineConfig(warmup_steps=50, min_lr_fraction=0.1)


def rates(config: ScheduleConfig, num_steps: int) -> list[float]:
    return [learning_rate(config, 1.0, step, num_steps) for step in range(1, num_steps + 1)]


def test_warmup_rises_to_the_peak_and_the_cosine_falls_to_its_floor() -> None:
    found = rates(COSINE, 150)
    assert found[:50] == [step / 50 for step in range(1, 51)]
    assert found[99] == pytest.approx(0.55)  # halfway between the peak and the floor
    assert found[-1] == pytest.approx(0.1)
    assert found[50:] == sorted(found[50:], reverse=True)


@pytest.mark.parametrize("config", [COSINE, ConstantConfig(warmup_steps=50)], ids=["cosine", "constant"])
def test_a_warmup_longer_than_the_run_is_shortened_to_it(config: ScheduleConfig) -> None:
    assert rates(config, 20) == [step / 20 for step in range(1, 21)]


def test_a_warmup_as_long_as_the_run_is_left_alone() -> None:
    assert rates(COSINE, 50) == [step / 50 for step in range(1, 51)]
