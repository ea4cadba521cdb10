"""The control channel over two ranks of one process: the same messages at the same steps, however long these take."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

import pytest
import torch
import torch.distributed as dist

from steadfast.run.ledger import StepStats
from steadfast.world.control import ControlChannel, Rider, StepResult
from steadfast.world.runtime import STOP

Found = TypeVar("Found")
NUM_STEPS = 100
_TIMEOUT = timedelta(seconds=20)
# A group of two threads has no entry among those of the process, of which torch makes others.
pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend")


class Passenger(Rider):
    """Sends how many messages its rank has sent, where its rank's entry is."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_messages = 0
        self.results: list[tuple[int, list[float]]] = []

    def payload(self) -> list[float]:
        self._num_messages += 1
        payload = [0.0, 0.0]
        payload[self._rank] = 100.0 * self._rank + self._num_messages
        return payload

    def on_result(self, step: int, payload: list[float]) -> None:
        self.results.append((step, payload))


class Seen(NamedTuple):
    """What one rank knew.

    Attributes:
        read_at: at which step it read which steps.
        stop_at: the step at which it saw the request to stop.
        results: what travelled along with the messages.
    """

    read_at: list[tuple[int, list[int]]]
    losses: list[float]
    digests: list[int]
    stop_at: int | None
    results: list[tuple[int, list[float]]]


def _group(store: dist.Store, rank: int) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT))


def run_rank(store: dist.Store, rank: int, step_s: float, request_at: int | None = None) -> Seen:
    clock = (tick * step_s for tick in count())
    group = _group(store, rank)
    passenger = Passenger(rank)
    control = ControlChannel(group, 0, rider=passenger, clock=lambda: next(clock))
    read_at: list[tuple[int, list[int]]] = []
    finished: list[StepStats] = []
    stop_at = None
    for step in range(1, NUM_STEPS + 1):
        numbers = torch.tensor([float(step), 1.0, 1.0], dtype=torch.float64)
        result = StepResult(step, numbers, num_samples=1, samples_digest=2**64 - 1 - rank)
        new = control.exchange(result, {STOP} if step == request_at else set())
        if new:
            read_at.append((step, [stats.step for stats in new]))
        finished += new
        if STOP in control.requested:
            assert stop_at is None  # it has been acknowledged
            stop_at = step
            control.acknowledge(STOP)
    rest = control.drain()
    read_at.append((NUM_STEPS + 1, [stats.step for stats in rest]))
    finished += rest
    losses = [stats.loss for stats in finished]
    digests = [stats.samples_digest for stats in finished]
    return Seen(read_at, losses, digests, stop_at, passenger.results)


def on_two_ranks(run: Callable[..., Found], ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> tuple[Found, Found]:
    """Return what a function returns on each of two ranks that share a store."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        leader, other = pool.submit(run, store, 0, *ours), pool.submit(run, store, 1, *theirs)
        return leader.result(), other.result()


@pytest.mark.parametrize(("leader_step_s", "most"), [(0.001, 32), (0.009, 5), (0.4, 1)])
def test_every_step_is_agreed_on_once_at_the_same_step_by_all(leader_step_s: float, most: int) -> None:
    """Steps share messages for 50 ms, at most 32 of them. A wish of one rank is heard once, with the next message."""
    leader, other = on_two_ranks(run_rank, (leader_step_s, None), (1.0, 60))
    assert leader == other
    assert [step for _, steps in leader.read_at for step in steps] == list(range(1, NUM_STEPS + 1))
    assert leader.losses == [float(step) for step in range(1, NUM_STEPS + 1)]
    assert set(leader.digests) == {(2 * 2**64 - 3) % 2**64}
    assert max(len(steps) for _, steps in leader.read_at) == most
    assert leader.stop_at is not None
    assert 60 < leader.stop_at <= min(61 + most, NUM_STEPS)
    # What ranks send along is heard after the same steps.
    read_at = [min(step, NUM_STEPS) for step, steps in leader.read_at if steps]
    assert [step for step, _ in leader.results][: len(read_at) - 1] == read_at[:-1]
    payloads = [payload for _, payload in leader.results]
    assert payloads == [[number, 100.0 + number] for number in range(1, len(payloads) + 1)]


def metrics_of_rank(store: dist.Store, rank: int, num: int) -> list[dict[str, float]]:
    """Steps so short that they share messages; each rank knows what its own samples add up to."""
    clock = (tick * 0.001 for tick in count())
    control = ControlChannel(_group(store, rank), 0, clock=lambda: next(clock))
    finished = []
    for step in range(1, NUM_STEPS + 1):
        # loss sum, count, gradient norm, and sum and count of the two metrics, the second with a count of its own
        numbers = torch.tensor([2.0 * num, num, 1.0, float(step * rank), num, 20.0, 2.0], dtype=torch.float64)
        result = StepResult(step, numbers, num_samples=num, samples_digest=0, metric_names=("accuracy", "length"))
        finished += control.exchange(result, set())
    finished += control.drain()
    return [dict(stats.metrics) for stats in finished]


@pytest.mark.parametrize(("ours", "theirs", "share"), [(4, 4, 1 / 8), (1, 7, 1 / 8), (0, 8, 1 / 8), (0, 0, None)])
def test_metrics_are_means_over_all_ranks_and_absent_where_nothing_counts(
    ours: int, theirs: int, share: float | None
) -> None:
    for found in on_two_ranks(metrics_of_rank, (ours,), (theirs,)):
        assert [metrics["length"] for metrics in found] == [10.0] * NUM_STEPS  # which has a count of its own
        if share is None:
            assert all("accuracy" not in metrics for metrics in found)
        else:
            assert [metrics["accuracy"] for metrics in found] == [step * share for step in range(1, NUM_STEPS + 1)]


Metrics = dict[tuple[int, int], dict[str, float]]  # by step and rank


def late_metrics_of_rank(store: dist.Store, rank: int, metrics: Metrics, step_s: float, lag: int) -> list[Any]:
    """Each step has the metrics of this rank; a metric of value v has the sum v and the count 1, or NaN and 0."""
    clock = (tick * step_s for tick in count())
    control = ControlChannel(_group(store, rank), lag, clock=lambda: next(clock))
    finished = []
    for step in range(1, NUM_STEPS + 1):
        own = dict(sorted(metrics.get((step, rank), {}).items()))
        pairs = [number for name, value in own.items() for number in (value, float(name != "nothing"))]
        numbers = torch.tensor([1.0, 1.0, 1.0, *pairs], dtype=torch.float64)
        result = StepResult(step, numbers, num_samples=1, samples_digest=7, metric_names=tuple(own))
        finished += control.exchange(result, set())
    return [*finished, *control.drain()]


@pytest.mark.parametrize(("step_s", "lag"), [(0.001, 0), (0.01, 1), (0.4, 0), (0.4, 1)])
def test_a_metric_that_comes_late_on_one_rank_has_its_value_from_its_first_step_on(step_s: float, lag: int) -> None:
    """One in step 4 of one rank, two at once on both ranks where steps share messages, and one in the last step."""
    metrics: Metrics = {
        (1, 0): {"first": 3.0},
        (4, 1): {"rare": 2.0},
        (70, 0): {"b": 1.0, "rare": 4.0},
        (70, 1): {"a": 5.0, "b": 2.0},
        (71, 1): {"a": 6.0},
        (80, 0): {"nothing": math.nan, "nan": math.nan},
        (100, 1): {"last": 9.0, "first": 1.0},
    }
    expected: dict[int, dict[str, float]] = {step: {} for step in range(1, NUM_STEPS + 1)}
    expected |= {1: {"first": 3.0}, 4: {"rare": 2.0}, 70: {"a": 5.0, "b": 1.5, "rare": 4.0}, 71: {"a": 6.0}}
    expected |= {80: {"nan": math.nan}, 100: {"last": 9.0, "first": 1.0}}
    for found in on_two_ranks(late_metrics_of_rank, (metrics, step_s, lag), (metrics, step_s, lag)):
        assert [stats.loss for stats in found] == [1.0] * NUM_STEPS
        assert {stats.samples_digest for stats in found} == {14}
        for stats in found:
            assert dict(stats.metrics) == pytest.approx(expected[stats.step], rel=0, abs=0, nan_ok=True)
