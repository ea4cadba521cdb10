import pickle
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from steadfast.config import Target, TargetData
from steadfast.data.order import Int64s, OwnOrder, Permutation, SampleOrder, build_order, uniform
from steadfast.errors import DataError
from tests.examples.orders import Curriculum, LengthBuckets
from tests.support.orders import samples_digest

SEEDS = st.integers(0, 2**63 - 1)
FROZEN_TRAIN = [977, 243, 94, 529, 756, 902, 253, 324]
FROZEN_VALIDATION = [175, 143, 938, 664]
FROZEN_DIGEST = 15385669249192051020


def key(seed: int) -> NDArray[np.uint64]:
    return np.array([seed], np.uint64)


@given(st.integers(1, 3000), SEEDS)
def test_permutation_is_a_bijection(size: int, seed: int) -> None:
    assert sorted(Permutation(size, key(seed))(np.arange(size))) == list(range(size))


@given(st.integers(2**20, 2**62), SEEDS)
def test_permutation_of_any_size_stays_inside_and_does_not_repeat(size: int, seed: int) -> None:
    index = np.concatenate([np.arange(500), size - 1 - np.arange(500)])
    placed = Permutation(size, key(seed))(index)
    assert placed.min() >= 0
    assert placed.max() < size
    assert len(set(placed)) == len(index)


@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_every_small_permutation_is_about_as_likely(size: int) -> None:
    drawn = [tuple(Permutation(size, key(seed * 7919))(np.arange(size))) for seed in range(2400)]
    counts = [drawn.count(each) for each in set(drawn)]
    assert len(counts) == [2, 6, 24][size - 2]
    assert min(counts) > 0.5 * max(counts)


def test_permutation_looks_random_and_opens_a_trillion_samples_at_once() -> None:
    """Neighbours land independently: the mean gap of two uniform points is a third of the range."""
    placed = Permutation(100_000, key(1))(np.arange(100_000))
    assert abs(np.abs(np.diff(placed)).mean() / 100_000 - 1 / 3) < 0.01
    assert abs(np.corrcoef(placed, np.arange(100_000))[0, 1]) < 0.02
    began = time.perf_counter()
    ids = SampleOrder(10**12, 0.1, 1).train(np.arange(8))
    assert time.perf_counter() - began < 0.1
    assert len(set(ids)) == 8


@given(st.integers(2, 400), st.floats(0.0, 0.9), SEEDS, st.integers(0, 3))
def test_epochs_and_validation_partition_the_samples(num_samples: int, fraction: float, seed: int, epoch: int) -> None:
    order = SampleOrder(num_samples, fraction, seed)
    train = order.train(epoch * order.num_train + np.arange(order.num_train))
    held_out: Iterable[int] = order.validation(np.arange(order.num_validation)) if order.num_validation else []
    assert sorted([*train, *held_out]) == list(range(num_samples))
    assert (order.num_validation >= 1) == (fraction > 0)


def test_order_depends_on_seed_and_epoch_and_the_split_on_seed_alone() -> None:
    order, other = (SampleOrder(100, 0.2, seed) for seed in (1, 2))
    epochs = order.train(np.arange(240)).reshape(3, 80)
    held_out = set(order.validation(np.arange(20)))
    assert not (epochs[0] == epochs[1]).all()
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2]) == set(range(100)) - held_out
    assert held_out != set(other.validation(np.arange(20)))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=50))
def test_any_grouping_of_positions_gives_the_same_ids(positions: list[int]) -> None:
    order = SampleOrder(97, 0.1, 3)
    one_by_one = [int(order.train(np.array([position]))[0]) for position in positions]
    assert order.train(np.array(positions)).tolist() == one_by_one


def test_the_order_is_frozen() -> None:
    """A run must resume in the order that it began with: another order is another format of checkpoints."""
    order = SampleOrder(1000, 0.1, 1)
    assert order.train(np.arange(896, 904)).tolist() == FROZEN_TRAIN
    assert order.validation(np.arange(4)).tolist() == FROZEN_VALIDATION
    assert samples_digest(np.arange(3), np.arange(3), 1) == FROZEN_DIGEST


@given(st.permutations(range(8)), SEEDS)
def test_digest_ignores_grouping_and_catches_loss_repeat_and_swap(order: list[int], seed: int) -> None:
    ids = np.arange(8) * 31
    positions = np.array(order)
    whole = samples_digest(ids, positions, seed)
    parts = [samples_digest(ids[each], positions[each], seed) for each in np.array_split(np.arange(8), 3)]
    assert sum(parts) % 2**64 == whole

    swapped, repeated = ids.copy(), ids.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    repeated[0] = repeated[1]
    for wrong_ids, wrong_positions in ((swapped, positions), (repeated, positions), (ids[1:], positions[1:])):
        assert samples_digest(wrong_ids, wrong_positions, seed) != whole
    assert samples_digest(ids, positions, seed + 1) != whole


# An order that `data.order` gives.


def data(order: Any, fraction: float = 0.1) -> TargetData:
    return TargetData(target="a:b", order=order, validation_fraction=fraction)


@given(st.integers(2, 300), st.floats(0.0, 0.9))
def test_sequential_reads_samples_as_they_are_and_holds_out_the_last(num_samples: int, fraction: float) -> None:
    order = build_order(data("sequential", fraction), num_samples, 1)
    same_split = SampleOrder(num_samples, fraction, 1)
    assert (order.num_train, order.num_validation) == (same_split.num_train, same_split.num_validation)
    assert order.train(np.arange(2 * order.num_train)).tolist() == 2 * list(range(order.num_train))
    if order.num_validation:
        found = order.validation(np.arange(order.num_validation + 1)).tolist()
        assert found == [*range(order.num_train, num_samples), order.num_train]


def backwards(seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
    return num_samples - 1 - place


class Rotated:
    """Begins each epoch further on."""

    def __init__(self, by: int = 1) -> None:
        self._by = by

    def __call__(self, seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
        return (place + seed + self._by * epoch) % num_samples


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Target(target="tests.unit.test_order:backwards"), [8, 7, 8, 7]),
        (Target(target="tests.unit.test_order:Rotated"), [1, 2, 2, 3]),
        (Target(target="tests.unit.test_order:Rotated", args={"by": 3}), [1, 2, 4, 5]),
    ],
)
def test_a_target_is_the_function_or_what_makes_it(target: Target, expected: list[int]) -> None:
    order = build_order(data(target), 10, 1)
    assert order.train(np.array([0, 1, 9, 10])).tolist() == expected
    there = pickle.loads(pickle.dumps(order.train))  # as loader processes get it
    assert there(np.array([0, 1, 9, 10])).tolist() == expected


def counting() -> Callable[..., Any]:
    calls: list[int] = []

    def order(seed: int, epoch: Int64s, place: Int64s, num_samples: int) -> Int64s:
        calls.append(1)
        return (place + len(calls)) % num_samples

    return order


AGAIN = r"returns another sample at place \d+ of epoch \d when it is called again, or for fewer positions"
NOT_ORDERS: dict[str, tuple[Any, str]] = {
    "floats": (
        lambda seed, epoch, place, num: place / 2,
        r"returned float64 \(\d+,\) for \d+ positions; expected int64",
    ),
    "another shape": (lambda seed, epoch, place, num: place[:3], r"returned int64 \(3,\) for \d+ positions"),
    "held out": (
        lambda seed, epoch, place, num: place + epoch,
        r"returned sample 9 at place 8 of epoch 1; .* are 0 to 8",
    ),
    "negative": (lambda seed, epoch, place, num: place - 1, "returned sample -1 at place 0 of epoch 0"),
    "global generator": (lambda seed, epoch, place, num: np.random.randint(num, size=len(place)), AGAIN),
    "seeded in each call": (
        lambda seed, epoch, place, num: np.random.default_rng(seed).integers(num, size=len(place)),
        AGAIN,
    ),
    "counts its calls": (counting(), AGAIN),
}


@pytest.mark.parametrize(("order", "message"), NOT_ORDERS.values(), ids=NOT_ORDERS)
def test_what_is_no_order_is_refused_at_the_start(order: Any, message: str) -> None:
    with pytest.raises(DataError) as raised:
        build_order(data(Target.of_object("data.order", "order", order)), 10, 1)
    assert raised.match(f"^data.order: <live data.order>:order {message}")


def test_a_sample_out_of_range_is_noticed_whenever_it_comes() -> None:
    order = OwnOrder(10_000, 0.0, 1, lambda seed, epoch, place, num: place + (place == 7000) * 9999, "mine")
    order.train(np.arange(6999))
    with pytest.raises(DataError, match="mine returned sample 16999 at place 7000 of epoch 2"):
        order.train(20_000 + np.arange(6990, 7010))


def test_uniform_numbers_belong_to_their_position() -> None:
    epoch, place = np.divmod(np.arange(200_000), 1000)
    drawn = uniform(1, epoch, place)
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    assert np.abs(np.histogram(drawn, 10, (0.0, 1.0))[0] / 20_000 - 1).max() < 0.05
    assert len(np.unique(drawn)) == len(drawn)
    assert (uniform(1, epoch[5:9], place[5:9]) == drawn[5:9]).all()
    assert not (uniform(2, epoch, place) == drawn).any()


def test_the_examples_of_orders_are_valid_and_do_what_they_say() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 1003)
    for order in (LengthBuckets(lengths.tolist(), 10), Curriculum(lengths.tolist())):
        OwnOrder(1003, 0.0, 4, order, "example")
    places = np.arange(1003)
    epochs = [LengthBuckets(lengths.tolist(), 10)(4, np.full(1003, epoch), places, 1003) for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == places.tolist()
    assert epochs[0].tolist() != epochs[1].tolist()
    assert np.ptp(lengths[epochs[0][:1000]].reshape(100, 10), axis=1).mean() < 2
    means = [lengths[Curriculum(lengths.tolist())(4, np.full(1003, epoch), places, 1003)].mean() for epoch in range(10)]
    assert means == sorted(means)
    assert means[-1] == pytest.approx(lengths.mean(), abs=5)
