"""What follows a step: which acts are carried out, in which order, and who may request them."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadfast.config import Every
from steadfast.loop.periodic import Periodic
from steadfast.loop.trigger import Interval
from steadfast.world.control import ControlChannel
from steadfast.world.runtime import LEAVE, STOP, Signals

NUM_STEPS = 10


class Channel(ControlChannel):
    """What all ranks have requested, without ranks."""

    def __init__(self, *requested: str) -> None:
        self.requested = set(requested)


class Scripted:
    """A trigger that says what it is told to."""

    def __init__(self, due: bool = False, wanted: bool = False) -> None:
        self._due = due
        self._wanted = wanted
        self.num_done = 0
        self.num_asked = 0

    def due(self, step: int) -> bool:
        return self._due

    def wanted(self) -> bool:
        self.num_asked += 1
        return self._wanted

    def done(self) -> None:
        self.num_done += 1


@pytest.mark.parametrize(
    ("requested", "due", "at_end", "runs"),
    [
        ((), False, False, False),
        ((), True, False, True),
        (("checkpoint",), False, False, True),
        (("checkpoint",), True, False, True),  # once, not twice
        (("validation",), False, False, False),  # another act is meant
        (("checkpoint", STOP), False, False, False),  # the end writes the state anyway
        (("checkpoint", LEAVE), False, False, False),
        ((STOP,), True, False, True),  # every rank counts steps by itself, and no message is needed
        (("checkpoint",), True, True, False),  # the end of the run has acts of its own
    ],
)
def test_an_act_follows_a_step_if_it_is_due_or_requested(
    requested: tuple[str, ...], due: bool, at_end: bool, runs: bool
) -> None:
    ran: list[int] = []
    trigger = Scripted(due)
    periodic = Periodic(leader=True, at_end=lambda: at_end)
    periodic.add("checkpoint", trigger, ran.append)
    control = Channel(*requested)
    periodic.run(5, control)
    assert ran == ([5] if runs else [])
    assert trigger.num_done == runs
    # What has been carried out is acknowledged, what has not stays requested; nothing else is touched.
    assert control.requested == set(requested) - ({"checkpoint"} if runs else set())


def test_acts_follow_a_step_in_the_order_in_which_they_were_added() -> None:
    ran: list[str] = []
    periodic = Periodic(leader=False, at_end=lambda: ran[-2:] == ["validation", "snapshot"])

    def record(name: str, _: int) -> None:
        ran.append(name)

    for name in ("validation", "snapshot", "checkpoint"):
        periodic.add(name, Scripted(due=name != "snapshot"), partial(record, name))
    assert periodic.names == ["validation", "snapshot", "checkpoint"]
    periodic.run(1, Channel())
    assert ran == ["validation", "checkpoint"]
    periodic.run(2, Channel("snapshot"))
    # The second act has ended the run, so the third one is left to the end.
    assert ran == ["validation", "checkpoint", "validation", "snapshot"]


def test_an_act_is_done_and_acknowledged_only_after_it_ran() -> None:
    control = Channel("checkpoint")
    trigger = Scripted()
    periodic = Periodic(leader=True, at_end=lambda: False)

    def fail(step: int) -> None:
        raise OSError("no space left")

    periodic.add("checkpoint", trigger, fail)
    with pytest.raises(OSError, match="no space"):
        periodic.run(1, control)
    assert control.requested == {"checkpoint"}
    assert trigger.num_done == 0


@pytest.mark.parametrize("leader", [True, False])
def test_only_the_leader_s_clock_requests_but_every_trigger_is_asked(leader: bool) -> None:
    wanted, idle = Scripted(wanted=True), Scripted()
    periodic = Periodic(leader, at_end=lambda: False)
    periodic.add("checkpoint", wanted, lambda step: None)
    periodic.add("validation", idle, lambda step: None)
    assert periodic.requests(Signals()) == ({"checkpoint"} if leader else set())
    assert (wanted.num_asked, idle.num_asked) == (1, 1)


@pytest.mark.parametrize("leader", [True, False])
@pytest.mark.parametrize(
    ("signals", "requests"),
    [
        (Signals(), set()),
        (Signals(stop=True), {STOP}),
        (Signals(leave=True), {LEAVE}),
        (Signals(checkpoint=True), {"checkpoint"}),
        (Signals(stop=True, leave=True, checkpoint=True), {STOP, LEAVE, "checkpoint"}),
    ],
)
def test_any_rank_passes_its_signals_on(leader: bool, signals: Signals, requests: set[str]) -> None:
    assert Periodic(leader, at_end=lambda: False).requests(signals) == requests


@given(st.lists(st.integers(0, 200), min_size=NUM_STEPS - 1, max_size=NUM_STEPS - 1))
def test_minutes_on_the_leader_s_clock_are_steps_of_all_ranks(seconds: list[int]) -> None:
    """Two ranks whose clocks differ act after the same steps, though a request takes a step to arrive."""
    now_s = 0.0
    ran: list[list[int]] = [[], []]
    ranks = []
    for rank in range(2):
        skew = 100.0 * rank
        periodic = Periodic(leader=rank == 0, at_end=lambda: False)
        trigger = Interval(Every(2, "minutes"), 1, int, lambda skew=skew: skew + (1 + skew) * now_s)  # type: ignore[misc]
        periodic.add("checkpoint", trigger, ran[rank].append)
        ranks.append((periodic, Channel()))
    under_way: set[str] = set()
    expected = []
    since_s = 0.0
    for step, passed_s in enumerate(seconds, 1):
        now_s += passed_s
        arrived = under_way
        under_way = set()
        for periodic, control in ranks:
            under_way |= periodic.requests(Signals())
            control.requested |= arrived
            periodic.run(step, control)
        if arrived:
            expected.append(step)
            since_s = now_s
        # The leader asks before it acts, so a request is never raised twice for one period.
        assert not (arrived and under_way)
        assert bool(under_way) == (not arrived and now_s - since_s >= 120)
    assert ran == [expected, expected]


@pytest.mark.parametrize(
    ("requested", "ending"), [((), False), (("checkpoint",), False), ((STOP,), True), ((LEAVE,), True)]
)
def test_an_attempt_ends_on_request_to_stop_or_to_leave(requested: tuple[str, ...], ending: bool) -> None:
    assert Channel(*requested).ending is ending
