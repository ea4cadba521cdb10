"""Who is given how many microbatches: the policy by itself, and the messages that carry the times."""

import random
from itertools import product
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steadfast.balance.policy import SpeedPolicy
from steadfast.balance.shares import SpeedBalance
from steadfast.balance.stopwatch import Stopwatch
from steadfast.data import Fetched
from steadfast.plan import Microbatch, Plan, Shares, even_shares, fastest_shares
from steadfast.run.events import Event
from steadfast.world.runtime import World
from tests.support.events import Published

SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=4)


def test_shares_follow_the_speeds() -> None:
    assert fastest_shares((3, 1), 16) == (12, 4)
    assert fastest_shares((5, 1, 1), 2) == (1, 1, 0)


@given(SPEEDS, st.integers(1, 12))
def test_no_other_shares_end_sooner(speeds: list[float], num_microbatches: int) -> None:
    shares = fastest_shares(speeds, num_microbatches)
    assert sum(shares) == num_microbatches
    assert min(shares) >= (num_microbatches >= len(speeds))
    if num_microbatches < len(speeds):
        return
    others = (each for each in product(range(1, num_microbatches + 1), repeat=len(speeds)) if sum(each) == sum(shares))
    assert step_s(shares, speeds) <= min(step_s(other, speeds) for other in others) * (1 + 1e-12)


@given(SPEEDS, st.integers(1, 40), st.integers(2, 4))
def test_shares_of_sharded_replicas_cover_the_grid(speeds: list[float], num_microbatches: int, shard_size: int) -> None:
    shares = fastest_shares(speeds, num_microbatches, shard_size)
    assert sum(shares) == num_microbatches
    replicas = zip(*[iter(shares)] * shard_size, strict=True)
    assert tuple(map(max, replicas)) == fastest_shares(speeds, -(-num_microbatches // shard_size))


@given(st.integers(1, 100), st.integers(1, 20))
def test_equal_speeds_are_even_shares(num_microbatches: int, world_size: int) -> None:
    assert fastest_shares([0.3] * world_size, num_microbatches) == even_shares(num_microbatches, world_size)


def step_s(shares: Shares, speeds: list[float]) -> float:
    return max(share / speed for share, speed in zip(shares, speeds, strict=True))


def decisions(words: list[tuple[float, ...]], shares: Shares) -> list[tuple[int, Shares]]:
    """The words after which something was decided, counted from 1, and what; decisions are carried out at once."""
    policy, found = SpeedPolicy(len(shares)), []
    for number, word in enumerate(words, 1):
        reshare = policy.decide(word, shares)
        if reshare is not None:
            shares = reshare.shares
            found.append((number, shares))
    return found


STEADY = [(0.01, 0.03)]


@pytest.mark.parametrize(
    ("words", "shares", "expected"),
    [
        (STEADY * 11, (8, 8), []),
        (STEADY * 50, (8, 8), [(12, (12, 4))]),
        (STEADY * 50, (12, 4), []),
        ([(0.01, 0.01)] * 50, (8, 8), []),
        ([(0.01, 0.01)] * 50, (12, 4), [(12, (8, 8))]),
        ([(0.01, 0.0101)] * 50, (128, 128), []),  # (129, 127) would be 1 % faster
        ([(0.01, 0.012)] * 50, (8, 8), [(12, (9, 7))]),
        ([(0.01, 0.0)] * 50, (8, 8), []),  # nothing is known of a rank that says nothing
        ([(0.01, 0.0), (0.01, 0.03)] * 20, (8, 8), [(13, (12, 4))]),  # it is taken at its last word
        (([(0.01, 0.01)] * 7 + [(0.01, 9.0)]) * 8, (8, 8), []),  # a worker that is interrupted now and then
        (([(0.01, 0.03)] * 11 + [(0.09, 0.03)]) * 8, (8, 8), [(12, (12, 4))]),  # and one that is slow all the same
        ([(0.01, 0.01)] * 20 + STEADY * 30, (8, 8), [(31, (12, 4))]),  # slowed after word 20
        (STEADY * 20 + [(0.01, 0.01)] * 30, (8, 8), [(12, (12, 4)), (31, (8, 8))]),  # and fast again
        ([(0.01, 0.03, 0.01)] * 50, (2, 2, 2), [(12, (3, 1, 2))]),
    ],
)
def test_shares_change_when_it_has_been_worth_it_for_a_while(
    words: list[tuple[float, ...]], shares: Shares, expected: list[tuple[int, Shares]]
) -> None:
    assert decisions(words, shares) == expected


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_moves_nothing_of_equal_workers_and_little_of_unequal_ones(seed: int) -> None:
    """Ten per cent, and of equal workers a tenth of all words three times as long."""
    noise = random.Random(seed)
    words = [tuple(noise.gauss(0.01, 0.001) * noise.choice([1] * 9 + [3]) for _ in range(2)) for _ in range(2000)]
    assert decisions(words, (8, 8)) == []
    found = decisions([(noise.gauss(0.01, 0.001), noise.gauss(0.03, 0.003)) for _ in range(2000)], (8, 8))
    assert 1 <= len(found) <= 3
    assert found[-1][1] in ((12, 4), (13, 3), (11, 5))


def hear_steadily(num_ahead: int, num_steps: int) -> tuple[Plan, list[Event]]:
    """A leader whose words are read after every step, over a loader that reads `num_ahead` microbatches ahead."""
    plan, told = Plan.even(32, 2, 2), Published()
    balance = SpeedBalance(plan, num_ahead, World(0, 2, 1, cast(Any, None)), cast(Any, told))
    stream = plan.stream(0, 1, 10**6)
    ahead = [next(stream) for _ in range(num_ahead)]
    for step in range(1, num_steps + 1):
        for _ in range(plan.num_forwards(step, 0)):
            if num_ahead:
                ahead.append(next(stream))
            else:
                ahead = [next(stream)]
            assert ahead.pop(0).step == step
        balance.on_result(step, [0.01, 0.03])
    return plan, told


@pytest.mark.parametrize(("num_ahead", "first_step"), [(0, 13), (4, 14), (8, 14), (9, 15), (256, 45)])
def test_new_shares_begin_where_no_loader_has_read_yet(num_ahead: int, first_step: int) -> None:
    plan, (event,) = hear_steadily(num_ahead, 60)
    text = f"shares (8, 8) -> (12, 4) microbatches from step {first_step}: rank 1 is 3.0x slower than the fastest rank"
    shown = {"text": text, "step": first_step, "before": (8, 8), "after": (12, 4), "microbatch_ms": (10.0, 30.0)}
    assert event.to_line() == {"time_s": None, "event": "shares", "attempt": 1, **shown}
    assert [plan.shares_at(step) for step in (first_step - 1, first_step)] == [(8, 8), (12, 4)]


def timed(stopwatch: Stopwatch, *shares: int, loss_s: float = 1.0, rest_s: float = 2.0, wait_s: float = 100.0) -> None:
    """Steps of so many microbatches each, on a clock that this moves; after each step all wait for each other."""
    clock = cast(Any, stopwatch._clock)

    stream = [(step, index, share) for step, share in enumerate(shares, 1) for index in range(share)]
    batches = stopwatch.batches(Fetched(Microbatch(step, index, 0, 1), (), 1, 0) for step, index, _ in stream)
    for (_, index, share), _ in zip(stream, batches, strict=True):
        clock.now += loss_s
        stopwatch.forwarded()
        clock.now += rest_s + wait_s * (index == share - 1)


class HandClock:
    def __init__(self) -> None:
        self.now = 1.0

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return True

    def between_s(self, first: float, second: float) -> float:
        return second - first


@pytest.fixture
def stopwatch() -> Stopwatch:
    found = Stopwatch(torch.device("cpu"))
    found._clock = cast(Any, HandClock())
    return found


def test_a_microbatch_is_timed_without_the_waiting_for_others(stopwatch: Stopwatch) -> None:
    timed(stopwatch, 4, 2, 3)
    assert stopwatch.take_s() == 3.0
    assert stopwatch.take_s() == 0.0


def test_a_rank_with_one_microbatch_a_step_is_timed_by_its_forward(stopwatch: Stopwatch) -> None:
    timed(stopwatch, 1, 1, 1)
    assert stopwatch.take_s() == 3.0  # three forwards of 1 s
    timed(stopwatch, 2, 2, rest_s=4.0)
    assert stopwatch.take_s() == 5.0
    timed(stopwatch, 1, 1, 1, loss_s=2.0, rest_s=100.0)
    assert stopwatch.take_s() == 10.0  # a whole one was five forwards


def test_what_the_device_has_not_passed_is_read_later(stopwatch: Stopwatch) -> None:
    timed(stopwatch, 4)
    clock = cast(Any, stopwatch._clock)
    clock.passed = lambda mark: mark < 5.0
    assert stopwatch.take_s() == 3.0
    assert len(stopwatch._lapses) == 2
    clock.passed = lambda mark: True
    assert stopwatch.take_s() == 3.0
