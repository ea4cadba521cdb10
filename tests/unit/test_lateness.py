"""A watcher that wakes late measures how busy its machine is."""

import pytest

from steadfast.liveness.lateness import Lateness
from tests.support.clock import Clock


@pytest.mark.parametrize(
    ("slept_s", "watched_s", "gap", "stretch"),
    [
        (0.25, 0.25, False, 1.0),
        (0.35, 0.35, False, 1.0),  # a busy machine, as there are many
        (0.5, 0.5, False, 1.5),
        (1.0, 0.5, False, 3.5),
        (1.25, 0.5, False, 4.5),
        (1.3, 0.5, True, 1.0),  # stopped, not slow
        (20.0, 0.5, True, 1.0),
    ],
)
def test_a_watcher_that_wakes_late_knows_it(slept_s: float, watched_s: float, gap: bool, stretch: float) -> None:
    clock = Clock()
    lateness = Lateness(0.25, clock=clock)
    for seconds in (0.25, slept_s):
        lateness.begin()
        clock.now_s += seconds
        found = lateness.woke()
    assert found == (pytest.approx(watched_s), gap)
    assert lateness.stretch == pytest.approx(stretch)
    for _ in range(40):
        lateness.begin()
        clock.now_s += 0.25
        lateness.woke()
    assert lateness.stretch == 1.0
