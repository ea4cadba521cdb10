"""The learning rate, which is a pure function of the step."""

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR, LRScheduler, OneCycleLR, StepLR

from steadfast.config import (
    ConstantConfig,
    CosineConfig,
    LinearConfig,
    OneCycleConfig,
    ScheduleConfig,
    StepConfig,
    Target,
    WsdConfig,
)
from steadfast.optim.schedule import build_schedule, learning_rate

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
    for num_steps in (20, 50):
        assert rates(config, num_steps) == [step / num_steps for step in range(1, num_steps + 1)]


def rates_of_torch(kind: type[LRScheduler], num_steps: int, **arguments: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = kind(optimizer, **arguments)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_of_torchs_names_are_torchs() -> None:
    """Torch counts from 0, and its linear one ends a step after the run's last."""
    ours = rates(StepConfig(every_steps=30, gamma=0.1), 100)
    assert ours == pytest.approx(rates_of_torch(StepLR, 100, step_size=30, gamma=0.1))
    for num_steps in (2, 3, 100):
        ours = rates(OneCycleConfig(), num_steps)
        assert ours == pytest.approx(rates_of_torch(OneCycleLR, num_steps, max_lr=1.0, total_steps=num_steps))
    ours = rates(LinearConfig(warmup_steps=0, min_lr_fraction=0.2), 99)
    torchs = rates_of_torch(LinearLR, 100, start_factor=1.0, end_factor=0.2, total_iters=99)
    assert ours == pytest.approx(torchs[1:])


def test_wsd_warms_up_is_stable_and_decays() -> None:
    found = rates(WsdConfig(warmup_steps=10, decay_fraction=0.2, min_lr_fraction=0.1), 100)
    assert found[:10] == [step / 10 for step in range(1, 11)]
    assert found[10:80] == [1.0] * 70
    assert found[80:] == pytest.approx([1 - 0.9 * step / 20 for step in range(1, 21)])


@pytest.mark.parametrize("config", [LinearConfig(), WsdConfig(), StepConfig(every_steps=1), OneCycleConfig()])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_rates_of_the_shortest_runs_are_rates(config: ScheduleConfig, num_steps: int) -> None:
    assert all(0 <= rate <= 1 for rate in rates(config, num_steps))


def halved_every_third_step(step: int, num_steps: int, start: float) -> float:
    return start * 0.5 ** ((step - 1) // 3)


def test_ones_own_schedule_is_a_factor_of_the_peak() -> None:
    target = Target(target="tests.unit.test_schedule:halved_every_third_step", args={"start": 0.8})
    schedule = build_schedule(target, num_steps=10)
    assert [schedule(step, 2.0) for step in (1, 3, 4, 7)] == pytest.approx([1.6, 1.6, 0.8, 0.4])
