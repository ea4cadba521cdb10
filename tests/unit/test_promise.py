"""Bound on the training that the loss of a worker of a sharded state repeats: kept, or said not to be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadfast.checkpoint.promise import Promise
from steadfast.config import Every
from tests.support.clock import Clock


def promise(count: float, unit: str, on: bool = True) -> tuple[Promise, Clock]:
    clock = Clock()
    return Promise(Every(count, unit), clock, on), clock  # type: ignore[arg-type]


def reason(made: Promise) -> str:
    assert made.broken is not None
    return str(made.broken.fields()["reason"])


@pytest.mark.parametrize(("bound", "half_s"), [((10, "seconds"), 5.0), ((2, "minutes"), 60.0)])
def test_bound_in_seconds_asks_for_a_copy_after_half_of_it(bound: tuple[int, str], half_s: float) -> None:
    made, clock = promise(*bound)
    for step in (1, 2):
        clock.now_s += half_s - 0.1
        assert not made.is_urgent()
        assert not made.due(1000 * step)
        clock.now_s += 0.2
        assert made.is_urgent()
        made.begin_copy(step, last_is_whole=step > 1)
        made.complete_copy()
        assert not made.is_urgent()
    assert made.broken is None


def test_bound_in_steps_is_due_on_every_rank_alike_and_by_no_clock() -> None:
    ranks = [promise(4, "steps") for _ in range(2)]
    due: list[list[int]] = [[], []]
    for made, _ in ranks:
        made.begin(100)
    for step in range(101, 120):
        for rank, (made, clock) in enumerate(ranks):
            clock.now_s += 50.0 * rank
            assert not made.is_urgent()
            if made.due(step) or step == 110:  # the leader may request a copy at any other step
                due[rank].append(step)
                made.begin_copy(step, last_is_whole=len(due[rank]) > 1)
                made.complete_copy()
    assert due == [[104, 108, 110, 114, 118]] * 2
    assert [made.broken for made, _ in ranks] == [None, None]


def test_training_counts_from_the_restored_step() -> None:
    made, clock = promise(10, "seconds")
    clock.now_s += 300.0  # the model is built
    made.begin(7)
    assert not made.is_urgent()
    assert made.broken is None


def test_copy_that_is_refused_is_not_tried_again_after_every_step() -> None:
    made, clock = promise(10, "seconds")
    clock.now_s += 6.0
    assert made.is_urgent()
    made.begin_copy(1, last_is_whole=False)
    clock.now_s += 1.0
    assert not made.is_urgent()
    clock.now_s += 4.0
    assert made.is_urgent()


def test_long_step_breaks_the_promise() -> None:
    made, clock = promise(10, "seconds")
    clock.now_s += 10.5
    made.is_urgent()
    assert made.broken is not None
    assert made.broken.line() == (
        "checkpoint.lose_at_most=10 seconds is not kept: a step takes too long; "
        "the newest copy in node memory is 10.5 seconds old"
    )


@pytest.mark.parametrize("completes", [True, False])
def test_long_copy_breaks_the_promise(completes: bool) -> None:
    made, clock = promise(10, "seconds")
    clock.now_s += 5.0
    made.begin_copy(1, last_is_whole=False)
    clock.now_s += 6.0
    if completes:
        made.complete_copy()
    made.is_urgent()
    assert reason(made) == "a copy takes too long"


@pytest.mark.parametrize("unit", ["seconds", "steps"])
def test_part_that_another_node_has_not_kept_breaks_the_promise(unit: str) -> None:
    made, clock = promise(10, unit)
    for step in range(10, 60, 10):
        clock.now_s += 6.0
        made.begin_copy(step, last_is_whole=step in (20, 30))
        made.complete_copy()  # here
        assert (made.broken is not None) is (step >= 40)
    # Copies of steps 10 and 20 were whole, that of step 30 was not.
    assert reason(made) == "a node did not keep its part of the last copy"


@pytest.mark.parametrize(
    ("on", "stated"),
    [
        (True, "the loss of a worker costs at most 20 steps of training (checkpoint.lose_at_most)"),
        (False, "checkpoint.lose_at_most=20 steps is not kept: no copies are made (checkpoint.node_memory)"),
    ],
)
def test_promise_is_stated_with_its_bound(on: bool, stated: str) -> None:
    assert promise(20, "steps", on)[0].stated == stated


DURATIONS = st.lists(st.tuples(st.floats(0.01, 8.0), st.floats(0.0, 12.0)), min_size=5, max_size=40)


@given(DURATIONS)
def test_promise_is_kept_or_said_to_be_broken(durations: list[tuple[float, float]]) -> None:
    """A step and a transfer may take any time; a request takes a step to arrive."""
    made, clock = promise(10, "seconds")
    safe_s = began_s = clock.now_s
    arrives_s: float | None = None
    requested = copied = False
    for step, (step_s, copy_s) in enumerate(durations, 1):
        clock.now_s += step_s
        if clock.now_s - safe_s > 10:  # what a kill would cost here
            made.is_urgent()
            assert made.broken is not None
            return
        acts, requested = requested, False
        if arrives_s is not None and clock.now_s >= arrives_s:
            arrives_s = None
            safe_s = began_s
            made.complete_copy()
            copied = True
        if arrives_s is None and not acts:
            requested = made.is_urgent()
        if acts:
            made.begin_copy(step, copied)
            copied = False
            began_s, arrives_s = clock.now_s, clock.now_s + copy_s
    if all(step_s <= 1.0 and copy_s <= 2.0 for step_s, copy_s in durations):
        assert made.broken is None


def test_age_of_a_copy_counts_from_the_copied_state_and_not_from_the_end_of_the_copy() -> None:
    made, clock = promise(10, "seconds")
    made.begin_copy(1, last_is_whole=False)
    clock.now_s += 4.0
    made.complete_copy()
    clock.now_s += 7.0
    made.is_urgent()
    assert made.broken is not None
