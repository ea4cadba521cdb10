"""Who computes a microbatch twice, and who was wrong: pure functions, over all worlds and digests."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadfast.guards.corruption import Check, choose, differ, odd_one_out
from steadfast.plan import Microbatch, Plan

SEED = 5


def plan(shares: tuple[int, ...], num_samples: int | None = None, skip: frozenset[int] = frozenset()) -> Plan:
    return Plan(2 * sum(shares), 2, shares, num_samples=num_samples, skip=skip)


def checks(shares: tuple[int, ...], last_step: int, every: int = 1, kinds: list[str] | None = None) -> list[Check]:
    found = [
        choose(plan(shares), every, SEED, kinds or ["gpu"] * len(shares), step) for step in range(1, last_step + 1)
    ]
    return [check for check in found if check is not None]


@settings(max_examples=200, deadline=None)
@given(
    shares=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any).map(tuple),
    every=st.integers(1, 5),
    seed=st.integers(0, 2**40),
    step=st.integers(1, 10**6),
    kinds=st.lists(st.sampled_from("ab"), min_size=6, max_size=6),
)
def test_it_is_the_first_microbatch_of_its_owner_and_all_others_are_different_ranks_of_its_kind(
    shares: tuple[int, ...], every: int, seed: int, step: int, kinds: list[str]
) -> None:
    kinds = kinds[: len(shares)]
    subject = plan(shares)
    check = choose(subject, every, seed, kinds, step)
    alike = {rank for rank, share in enumerate(shares) if share and kinds.count(kinds[rank]) > 1}
    if check is None:
        assert step % every or not alike
        return
    assert step % every == 0
    assert subject.microbatches(step, check.owner)[0] == check.microbatch
    assert check.microbatch.weight == 1
    assert len(set(check.ranks)) == len(check.ranks)
    assert {kinds[rank] for rank in check.ranks} == {kinds[check.owner]}
    assert (check.third is None) == (kinds.count(kinds[check.owner]) == 2)
    assert choose(plan(shares), every, seed, kinds, step) == check


def test_every_rank_is_checked_as_often_as_any_other_whatever_its_share() -> None:
    found = checks((5, 1, 1, 0), 4000)
    assert len(found) == 4000
    owners = Counter(check.owner for check in found)
    assert owners.keys() == {0, 1, 2}  # the last one has nothing of its own to check, and checks others
    assert max(owners.values()) < 1.15 * min(owners.values())
    pairs = Counter((check.owner, check.second) for check in found)
    assert len(pairs) == 9
    assert max(pairs.values()) < 1.4 * min(pairs.values())
    assert len({(check.owner, check.second, check.third) for check in found}) == 18


def test_only_the_steps_that_are_due_and_not_left_out_have_one() -> None:
    assert [check.microbatch.step for check in checks((2, 2), 12, every=4)] == [4, 8, 12]
    left_out = plan((2, 2), skip=frozenset({8}))
    assert choose(left_out, 4, SEED, ["gpu"] * 2, 8) is None
    assert checks((3,), 10) == []


def test_ranks_without_a_microbatch_in_a_short_last_step_own_none() -> None:
    short = plan((2, 2, 2), num_samples=12 + 3)  # the second step has two microbatches, both of rank 0
    owners = set()
    for seed in range(50):
        check = choose(short, 1, seed, ["gpu"] * 3, 2)
        assert check is not None
        owners.add(check.owner)
    assert owners == {0}


MICROBATCH = Microbatch(7, 0, 0, 2)


@pytest.mark.parametrize(
    ("owner", "second", "third", "odd"),
    [(1, 1, 0, None), (9, 1, 1, "owner"), (1, 9, 1, "second"), (8, 9, 1, None)],
)
def test_of_three_the_one_that_none_agrees_with_is_wrong(owner: int, second: int, third: int, odd: str | None) -> None:
    for ranks in ((0, 1, 2), (2, 0, 3), (3, 2, 1)):
        check = Check(MICROBATCH, *ranks)
        digests, again = [0] * 4, [0] * 4
        digests[check.owner], digests[check.second], again[ranks[2]] = owner, second, third
        assert differ(check, digests) == (owner != second)
        if owner != second:
            assert odd_one_out(check, digests, again) == (getattr(check, odd) if odd else None)


def test_of_two_the_one_that_does_not_come_to_the_same_twice_is_wrong() -> None:
    check = Check(MICROBATCH, 1, 0, None)
    right, wrong, other = 1, 2, 3
    for first, again in product(product((right, wrong), repeat=2), product((right, wrong, other), repeat=2)):
        if first[0] == first[1]:
            continue
        unsteady = [rank for rank in (0, 1) if first[rank] != again[rank]]
        expected = unsteady[0] if len(unsteady) == 1 else None
        assert odd_one_out(check, first, again) == expected
