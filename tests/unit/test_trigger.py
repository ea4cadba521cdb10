"""When something periodic is due, and what an attempt's end makes of it."""

import pytest

from steadfast.config import Every
from steadfast.loop.trigger import Interval
from tests.support.clock import Clock


@pytest.mark.parametrize(
    ("every", "due"),
    [
        (Every(3, "steps"), [3, 6, 9]),
        (Every(1, "epochs"), [3, 5, 8, 10]),
        (Every(1.2, "epochs"), [3, 6, 9]),
        (Every(1, "minutes"), []),
        (None, []),
    ],
)
def test_steps_and_epochs_are_counted(every: Every | None, due: list[int]) -> None:
    trigger = Interval(every, 25, lambda step: 10 * step)
    assert [step for step in range(1, 11) if trigger.due(step)] == due


def test_minutes_are_wanted_once_until_they_are_done() -> None:
    trigger, clock = minutes(2)
    assert not trigger.wanted()
    clock.now_s += 121
    assert [trigger.wanted(), trigger.wanted()] == [True, False]
    trigger.done()
    assert not trigger.wanted()
    clock.now_s += 121
    assert trigger.wanted()


def test_short_attempts_and_new_processes_do_not_put_it_off_and_a_wish_outlives_its_attempt() -> None:
    trigger, clock = minutes(2)
    for _ in range(3):
        clock.now_s += 50
        trigger.begin()
    assert trigger.wanted()
    trigger.begin()
    assert trigger.wanted()
    of_new_process, _ = minutes(2)
    of_new_process.begin(age_s=121)  # of the checkpoint that it found
    assert of_new_process.wanted()


def minutes(count: int) -> tuple[Interval, Clock]:
    clock = Clock()
    return Interval(Every(count, "minutes"), 1, int, clock), clock
