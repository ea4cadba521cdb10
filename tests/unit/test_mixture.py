"""Mixtures: shares of sources, the order of their samples, and what is refused."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadfast.config import MixtureData, TextSource, parse_config
from steadfast.data import Extent, build_dataset, build_order
from steadfast.data.mixture import Mixture, Turns
from steadfast.data.order import MixtureOrder, OwnOrder, SampleOrder
from steadfast.errors import ConfigError, DataError

SIZES = (40, 7, 100)
WEIGHTS = (3, 1, 2)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_each_source_has_its_share_of_any_first_places_to_within_one(weights: list[int]) -> None:
    turns = Turns(weights)
    sources, ranks = turns(np.arange(2 * turns.period + 5))
    counts = np.zeros(len(weights))
    for number, (source, rank) in enumerate(zip(sources.tolist(), ranks.tolist(), strict=True), 1):
        assert rank == counts[source]
        assert turns.position(source, rank) == number - 1
        counts[source] += 1
        assert np.all(np.abs(counts - number * np.array(weights) / turns.period) < 1)


def order(fraction: float = 0.0, seed: int = 1) -> MixtureOrder:
    return MixtureOrder([SampleOrder(size, fraction, seed) for size in SIZES], WEIGHTS, seed)


def source_of(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.searchsorted(np.cumsum(SIZES), ids, side="right")


def test_each_source_uses_all_its_samples_before_it_repeats_one() -> None:
    ids = order().train(np.arange(6 * 40))
    for number, (size, start) in enumerate(zip(SIZES, (0, 40, 47), strict=True)):
        its = ids[source_of(ids) == number]
        for first in range(0, len(its) - size + 1, size):
            assert sorted(its[first : first + size]) == list(range(start, start + size))


def test_a_position_has_one_sample_however_positions_are_asked_for() -> None:
    positions = np.arange(500)
    found = order().train(positions)
    assert [int(order().train(np.array([position]))[0]) for position in positions[:50]] == found[:50].tolist()
    assert np.array_equal(order().train(positions[::-1]), found[::-1])
    assert not np.array_equal(order(seed=2).train(positions), found)


def test_each_source_holds_samples_out() -> None:
    split = order(fraction=0.1)
    assert [part.num_validation for part in split.parts] == [4, 1, 10]
    held_out = split.validation(np.arange(15))
    assert Counter(source_of(held_out).tolist()) == {0: 4, 1: 1, 2: 10}
    assert np.array_equal(split.validation(np.arange(15, 30)), held_out)
    assert not set(held_out) & set(split.train(np.arange(1000)))


def mixture(*words: str) -> MixtureData:
    sources = ", ".join(words)
    data = parse_config(f"model: {{kind: gpt, context_length: 16}}\ndata: {{kind: mixture, sources: [{sources}]}}").data
    assert isinstance(data, MixtureData)
    return data


TEXT = "{kind: text, context_length: 16, weight: 0.7}"
TARGET = '{target: "tests.unit.test_mixture:tokens", weight: 0.3}'


def tokens() -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    return [(np.full(16, number), np.full(16, number)) for number in range(10)]


def test_a_configured_mixture_reads_the_samples_of_its_sources() -> None:
    config = mixture(TEXT, TARGET)
    assert config.integer_weights == (7, 3)
    dataset = build_dataset(config)
    assert isinstance(dataset, Mixture)
    text = len(build_dataset(TextSource(context_length=16)))
    assert [len(source) for source in dataset.sources] == [text, 10]
    assert dataset[text + 3][0][0] == 3
    built = build_order(config, Extent.of(dataset), 1)
    ids = built.train(np.arange(100))
    assert Counter((ids >= text).tolist()) == {False: 70, True: 30}


def test_sources_of_unequal_counts_are_counted() -> None:
    class Counted(list[int]):
        units_per_sample = 3
        counts_vary = False

    same, other = Counted([1, 2]), Counted([3])
    other.units_per_sample = 4
    assert (Mixture([same, same]).units_per_sample, Mixture([same, same]).counts_vary) == (3, False)
    assert Mixture([same, other]).counts_vary
    assert not hasattr(Mixture([same, other]), "units_per_sample")


def test_epochs_and_plain_samples_are_passed_on_to_the_sources() -> None:
    class Augmented(list[str]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def without_augmentation(self) -> list[str]:
            return ["plain"]

    augmented = Augmented(["random"])
    both = Mixture([["text"], augmented])
    both.set_epoch(3)
    assert augmented.epoch == 3
    plain = both.without_augmentation()
    assert [plain[index] for index in range(len(plain))] == ["text", "plain"]
    assert not hasattr(Mixture([["text"]]), "set_epoch")


def test_several_samples_are_read_by_the_sources_that_can() -> None:
    class Several(list[str]):
        is_augmented = False

        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"{self[index]} of {len(indices)}" for index in indices]

    class Plain(list[str]):
        is_augmented = False

    mixed = Mixture([Several(["a", "b"]), Plain(["c"])])
    assert mixed.__getitems__([1, 2, 0, 1]) == ["b of 3", "c", "a of 3", "b of 3"]
    assert not mixed.is_augmented
    assert Mixture([Several(["a"]), ["c"]]).is_augmented


def test_an_order_function_gets_no_empty_array() -> None:
    class Strict:
        def __call__(self, seed: int, epoch: Any, place: Any, num_samples: int) -> Any:
            return np.full(len(place), int(place[0]) * 0)

    parts = [SampleOrder(40, 0.0, 1), OwnOrder(7, 0.0, 1, Strict(), "strict")]
    assert len(MixtureOrder(parts, (19, 1), 1).train(np.arange(8))) == 8


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("{kind: mixture, sources: []}", "data.sources"),
        ("{kind: mixture, sources: [{kind: text, weight: 0}]}", "weight"),
        ("{kind: mixture, sources: [{kind: text, weight: 0.123457}, {kind: text}]}", "round them to fewer digits"),
        ("{kind: mixture, order: sequential, sources: [{kind: text}]}", "data.order"),
        ("{kind: mixture, sources: [{kind: text, context_length: 64}]}", "at most model.context_length"),
        ("{kind: mixture, sources: [{kind: mixture, sources: []}]}", "unknown kind"),
    ],
)
def test_a_wrong_mixture_is_refused_by_the_key(data: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config(f"model: {{kind: gpt, context_length: 16}}\ndata: {data}")


def test_each_source_has_an_order_of_its_own() -> None:
    weighted = "order: {target: 'tests.support.orders:Weighted'}"
    config = mixture(TEXT, TARGET.replace("}", f", {weighted}}}", 1), TEXT.replace("}", ", order: sequential}"), TEXT)
    built = build_order(config, Extent(180, None, (Extent(50), Extent(30), Extent(50), Extent(50))), 1)
    assert isinstance(built, MixtureOrder)
    shuffled, drawn, in_order, other = (part.train(np.arange(part.num_train)).tolist() for part in built.parts)
    assert sorted(shuffled) != shuffled != other
    assert len(set(shuffled)) == len(shuffled)
    assert len(set(drawn)) < len(drawn)
    assert in_order == list(range(len(in_order)))


def test_the_target_and_the_order_of_a_source_are_refused_by_their_keys() -> None:
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.order=blocks: the dataset has no blocks"):
        build_order(mixture(TEXT, TEXT.replace("}", ", order: blocks}")), Extent(9, None, (Extent(4), Extent(5))), 1)
    wrong = mixture(TEXT, TEXT.replace("}", ", order: {target: 'tests.dist.test_order:by_chance'}}"))
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.order: tests\.dist\.test_order:by_chance returns"):
        build_order(wrong, Extent(99, None, (Extent(49), Extent(50))), 1)
    unknown = mixture(TEXT, TEXT.replace("}", ", order: {target: 'tests.dist.test_order:no'}}"))
    with pytest.raises(ConfigError, match=r"data\.sources\[1\]\.order"):
        build_order(unknown, Extent(99, None, (Extent(49), Extent(50))), 1)
    with pytest.raises(ConfigError, match=r"data\.sources\[1\]\.target"):
        build_dataset(mixture(TEXT, '{target: "tests.unit.test_mixture:nothing"}'))
