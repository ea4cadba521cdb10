"""The control word over two ranks of one process: the same words at the same steps, however long these take."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from app.agree import ControlWord, Flags, Rider
from app.step import StepResult

NUM_STEPS = 100
_TIMEOUT = timedelta(seconds=20)


class Passenger(Rider):
    """Says how many words its rank has sent, where its rank's entry is."""

    def __init__(self, rank: int) -> None:
        self._rank, self._num_words = rank, 0
        self.heard: list[tuple[int, list[float]]] = []

    def say(self) -> list[float]:
        self._num_words += 1
        said = [0.0, 0.0]
        said[self._rank] = 100.0 * self._rank + self._num_words
        return said

    def hear(self, step: int, said: list[float]) -> None:
        self.heard.append((step, said))


class Seen(NamedTuple):
    """What one rank knew: at which step it read which steps, how many words it posted, when it saw the wish, and what
    travelled with the words."""

    read_at: list[tuple[int, list[int]]]
    losses: list[float]
    digests: list[int]
    stop_at: int | None
    heard: list[tuple[int, list[float]]]


def run_rank(store: dist.Store, rank: int, step_s: float, wish_at: int | None = None) -> Seen:
    clock = (tick * step_s for tick in count())
    group = dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)
    passenger = Passenger(rank)
    control = ControlWord(group, 0, passenger, clock=lambda: next(clock))
    read_at, agreed, stop_at = [], [], None
    for step in range(1, NUM_STEPS + 1):
        numbers = torch.tensor([float(step), 1.0, 1.0], dtype=torch.float64)
        result = StepResult(step, numbers, num_samples=1, samples_digest=2**64 - 1 - rank)
        new = control.exchange(result, Flags(stop=step == wish_at))
        if new:
            read_at.append((step, [each.step for each in new]))
        agreed += new
        if control.wished.stop and stop_at is None:
            stop_at = step
            control.granted(stop=True)
    rest = control.drain()
    read_at.append((NUM_STEPS + 1, [each.step for each in rest]))
    agreed += rest
    return Seen(
        read_at, [each.loss for each in agreed], [each.samples_digest for each in agreed], stop_at, passenger.heard
    )


def run_both(leader_step_s: float, wish_at: int | None = None) -> tuple[Seen, Seen]:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(run_rank, store, 0, leader_step_s)
        other = pool.submit(run_rank, store, 1, 1.0, wish_at)
        return leader.result(), other.result()


@pytest.mark.parametrize("leader_step_s", [0.001, 0.012, 0.4])
def test_every_step_is_agreed_on_once_at_the_same_step_by_all(leader_step_s: float) -> None:
    leader, other = run_both(leader_step_s)
    assert leader == other
    assert [step for _, steps in leader.read_at for step in steps] == list(range(1, NUM_STEPS + 1))
    assert leader.losses == [float(step) for step in range(1, NUM_STEPS + 1)]
    assert set(leader.digests) == {(2 * 2**64 - 3) % 2**64}


def test_short_steps_share_words_and_long_ones_do_not() -> None:
    short, _ = run_both(0.009)
    assert max(len(steps) for _, steps in short.read_at) == 5  # 50 ms
    long, _ = run_both(0.4)
    assert max(len(steps) for _, steps in long.read_at) == 1


def test_a_wish_of_one_rank_reaches_all_at_the_same_step_and_is_heard_once() -> None:
    leader, other = run_both(0.009, wish_at=60)
    assert leader.stop_at == other.stop_at
    assert leader.stop_at is not None
    assert 60 < leader.stop_at <= 66


@pytest.mark.parametrize("leader_step_s", [0.001, 0.012, 0.4])
def test_what_ranks_send_along_is_heard_by_all_after_the_same_step(leader_step_s: float) -> None:
    leader, other = run_both(leader_step_s)
    assert leader.heard == other.heard
    read_at = [min(step, NUM_STEPS) for step, steps in leader.read_at if steps]
    assert [step for step, _ in leader.heard][: len(read_at) - 1] == read_at[:-1]
    assert [said for _, said in leader.heard] == [
        [number, 100.0 + number] for number in range(1, len(leader.heard) + 1)
    ]
