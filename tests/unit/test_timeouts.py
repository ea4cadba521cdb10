"""One number gives all limits, and they keep their order."""

import pytest

from steadfast.world.timeouts import Timeouts


@pytest.mark.parametrize("silence_s", [0.5, 5.0, 60.0, 600.0])
def test_each_limit_is_longer_than_the_one_that_should_have_helped_before_it(silence_s: float) -> None:
    timeouts = Timeouts(silence_s)
    limits = [
        timeouts.heartbeat_s,
        timeouts.silence_s,
        timeouts.connect.total_seconds(),
        timeouts.form.total_seconds(),
        timeouts.lease_s,
        timeouts.collective.total_seconds(),
    ]
    assert limits == sorted(set(limits))
    assert timeouts.silence_s >= 3 * timeouts.heartbeat_s  # two late heartbeats are not a death
    # Workers of a large world send fewer heartbeats, and still three within the limit.
    assert timeouts.heartbeat_of(200) == timeouts.heartbeat_s
    assert timeouts.heartbeat_s <= timeouts.heartbeat_of(4000) <= timeouts.heartbeat_of(10_000) <= silence_s / 3


def test_the_limit_for_connecting_grows_with_the_world() -> None:
    timeouts = Timeouts()
    assert timeouts.first_collectives(2) >= timeouts.form
    assert timeouts.first_collectives(512) > 3 * timeouts.first_collectives(2)
