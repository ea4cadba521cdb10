"""What the supervisor decides about a world that does not get on, over reports that nobody has to wait for."""

import re
from typing import Any

import pytest

from steadfast.config import RecoveryConfig
from steadfast.guards.failures import FailureKind
from steadfast.orchestration.heartbeat import Silence
from steadfast.orchestration.supervisor import Abort, Dump, Lose, Record, Release, Supervisor
from steadfast.run import events
from tests.support.events import notices
from tests.support.supervised import Supervised

STALL_S = 60.0
LEAST_S = 3.0  # the limit of a phase that usually takes moments
IN_FORWARD = ("forward", 1, 0)
COMPUTES = ("forward", 1, 1)  # inside torch, which may be a collective
WAITS = ("gradients", 4, 1)


class World(Supervised):
    """Members a, b ... of attempt 1, who report every second what the test says."""

    def __init__(self, names: str = "ab") -> None:
        super().__init__(names, RecoveryConfig(hang_limit_s=STALL_S))
        self.now_s = 1000.0
        self.step = 41
        self._since: dict[str, tuple[Any, float]] = {}
        self.spent_s: dict[str, float] = {}

    def live(self, seconds: float, *marks: tuple[str, int, int]) -> None:
        """Let time pass in which each member is where its mark says."""
        for tick in range(round(4 * seconds)):
            if tick % 4 == 0:
                self._report(marks[: len(self.world)])
            self.now_s += 0.25
            self.check(self.now_s)

    def _report(self, marks: tuple[tuple[str, int, int], ...]) -> None:
        for rank, (name, mark) in enumerate(zip(self.world, marks, strict=True)):
            phase, place, inside = mark
            since = self._since.get(name)
            if since is None or since[0] != (mark, self.step):
                since = self._since[name] = ((mark, self.step), self.now_s)
            self.report(name, rank, [self.step, 0, place, 1, inside], phase=phase, seconds=self.now_s - since[1])

    def report(self, name: str, rank: int, position: list[int], **fields: Any) -> None:
        report = {"attempt": 1, "rank": rank, "position": position, "step": self.step, "limit_s": LEAST_S}
        self.supervisor.heard(name, {"progress": {**report, "spent_s": {}, **fields}})

    def told(self) -> list[tuple[Any, ...]]:
        """Return the decisions so far, but those about stacks."""
        found: list[tuple[Any, ...]] = []
        for decision in self.decisions:
            match decision:
                case Record(events.Hang() as hang):
                    found.append(("hang", hang.ranks, hang.guess, hang.ends_s))
                case Record(events.HangOver() as over):
                    found.append(("over", over.ranks, round(over.seconds)))
                case Record(events.Notice() as silent):
                    line = silent.to_line()
                    found.append((line["event"], line["member"], line["answers"], line["ends_s"]))
                case Abort():
                    found.append(("abort",))
                case Lose(member, _, kind):
                    found.append(("lose", member, kind))
        return found


def test_a_rank_that_others_wait_for_is_named_within_five_seconds_and_ended_after_the_stated_time() -> None:
    world = World()
    world.live(5, WAITS, IN_FORWARD)
    assert world.told() == [("hang", (1,), "stuck", 60.0)]
    world.live(54, WAITS, IN_FORWARD)
    assert len(world.told()) == 1
    world.live(4, WAITS, IN_FORWARD)
    assert world.told()[1:] == [("lose", "b", FailureKind.HANG)]


def test_a_silent_worker_is_named_by_its_rank() -> None:
    world = World()
    world.live(1, WAITS, IN_FORWARD)
    world.stay_silent("b", Silence(5.1, answers=True, nobody_heard=False, stretch=1.0))
    (silent,) = notices(world.events, "silent")
    assert (silent["rank"], silent["member"]) == (1, "b")
    text = "no heartbeat from rank 1 for 5.1 s: its machine answers, its process does not; the worker is declared dead"
    assert silent["text"].startswith(text)


def train(world: World, seconds: int, slow: str = "") -> None:
    """Let time pass in which each member does a step a second, of which a slow one computes half."""
    for _ in range(seconds):
        world.step += 1
        for rank, name in enumerate(world.world):
            world.spent_s[name] = world.spent_s.get(name, 0.0) + (0.5 if name == slow else 0.1)
            spent_s = {"forward": world.spent_s[name], "gradients": world.step - world.spent_s[name]}
            world.report(name, rank, [world.step, 0, 1, 1, 0], phase="forward", seconds=0.1, spent_s=spent_s)
        world.now_s += 1.0
        world.check(world.now_s)


def stragglers(world: World) -> list[int]:
    return [event.rank for event in world.events if isinstance(event, events.Straggler)]


def test_a_slow_rank_is_named_within_a_minute_and_then_at_most_once_a_minute() -> None:
    world = World()
    train(world, 30)
    train(world, 15, slow="b")  # for some seconds, which makes no straggler
    train(world, 60)
    assert stragglers(world) == []
    train(world, 60, slow="b")
    assert stragglers(world) == [1]
    train(world, 60, slow="b")
    assert stragglers(world) == [1, 1]


def test_stacks_are_requested_once_for_each_hang_of_an_attempt() -> None:
    world = World()
    world.live(10, WAITS, IN_FORWARD)
    world.step += 1
    world.live(10, WAITS, IN_FORWARD)
    dumps = [decision.attempt for decision in world.decisions if isinstance(decision, Dump)]
    assert dumps == [1, 0, 0, 1, 0]  # the end of the first hang withdraws the request once more


def test_a_forward_of_forty_seconds_is_told_and_ends_nothing() -> None:
    world = World()
    for _ in range(3):
        world.live(40, WAITS, IN_FORWARD)
        world.step += 1
        world.live(2, IN_FORWARD, WAITS)
        world.step += 1
    assert world.told() == [("hang", (1,), "stuck", 60.0), ("over", (1,), 40)] * 3


def test_where_nobody_waits_for_anybody_it_is_slow_code() -> None:
    world = World()
    world.live(590, IN_FORWARD, IN_FORWARD)
    assert world.told() == [("hang", (0, 1), "slow", 600.0)]
    world.live(15, IN_FORWARD, IN_FORWARD)
    assert world.told()[1:] == [("abort",)]
    # which is enough, if they come out by themselves: to end them would lose all steps
    world.live(500, IN_FORWARD, IN_FORWARD)
    assert len(world.told()) == 2


def test_a_world_in_which_all_may_wait_for_each_other_is_aborted_and_only_then_its_members_ended() -> None:
    world = World()
    world.live(59, COMPUTES, COMPUTES)
    assert world.told() == [("hang", (0, 1), "all wait", 60.0)]
    world.live(4, COMPUTES, COMPUTES)
    assert world.told()[1:] == [("abort",)]
    # Nobody else holds the 41 steps.
    world.live(290, COMPUTES, COMPUTES)
    assert len(world.told()) == 2
    world.live(20, COMPUTES, COMPUTES)
    assert world.told()[2:] == [("lose", "a", FailureKind.HANG), ("lose", "b", FailureKind.HANG)]


def test_of_workers_that_hang_at_the_same_place_one_after_the_other_that_is_told() -> None:
    """Then it is more likely the step's samples than the workers."""
    world = World("abc")
    world.live(64, WAITS, WAITS, IN_FORWARD)
    world.live(64, WAITS, IN_FORWARD)
    first, second = (ending.cause for ending in world.endings if isinstance(ending, Lose))
    assert re.fullmatch(r"hung in forward for 6\d\.\d s", first)
    assert re.fullmatch(r"hung in forward for 6\d\.\d s, as 1 before it after step 41", second)


def test_the_samples_that_a_hung_worker_reads_are_named() -> None:
    world = World()
    reading = "while reading sample 7 (epoch 1)"
    for _ in range(66):
        for rank, (phase, place, text) in enumerate([("gradients", 4, ""), ("loader", 1, reading)]):
            seconds = world.now_s - 1000.0
            world.report("ab"[rank], rank, [41, 0, place, 1, 0], phase=phase, seconds=seconds, reading=text)
        world.now_s += 1.0
        world.check(world.now_s)
    (hang,) = [
        each.event for each in world.decisions if isinstance(each, Record) and isinstance(each.event, events.Hang)
    ]
    assert reading in hang.line()
    assert [each.cause.endswith(f" s {reading}") for each in world.endings if isinstance(each, Lose)] == [True]


def test_workers_have_longer_if_they_wake_late_or_the_supervisor_was_stopped() -> None:
    world = World()
    world.live(59, WAITS, IN_FORWARD)
    world.supervisor.discard_reports(world.now_s)
    world.live(4.75, WAITS, IN_FORWARD)
    assert not world.endings
    world.live(1, WAITS, IN_FORWARD)
    assert world.endings
    world = World()
    world.supervisor.heard("a", {"stretch": 2.0})
    world.live(115, WAITS, IN_FORWARD)
    assert not world.endings
    world.live(10, WAITS, IN_FORWARD)
    assert world.endings


@pytest.mark.parametrize(
    ("answers", "nobody_heard", "saved", "expected_s"),
    [
        (True, False, 0, 60.0),  # a stopped process
        (True, True, 0, 300.0),  # all of them, and nobody else holds their steps
        (True, True, 41, 300.0),
        (False, False, 0, 5.0),  # a machine that is gone
        (False, True, 0, 40.0),  # or this one, for all that is known: until workers give up too
        (False, True, 41, 5.0),
    ],
)
def test_how_long_a_worker_may_be_silent(answers: bool, nobody_heard: bool, saved: int, expected_s: float) -> None:
    world = World()
    world.live(0.25, WAITS, IN_FORWARD)
    world.supervisor._costs._step_s = 2.0
    if saved:
        world.supervisor.observe(events.Checkpoint(step=saved, path="x", seconds=1.0, blocked_s=0.0, bytes=1))
    for seconds in (4.9, 4.95):
        silence = Silence(seconds, answers, nobody_heard, stretch=1.0)
        assert world.stay_silent("a", silence) == pytest.approx(expected_s)
    assert world.told() == [("silent", "a", answers, expected_s)]
    world.supervisor.heard("a", {})
    world.stay_silent("a", silence)
    assert len(world.told()) == 2, "it was heard meanwhile"


def test_what_a_step_costs_each_rank_is_recorded() -> None:
    world = World()
    for _ in range(25):
        world.step += 1
        world.live(1, COMPUTES, COMPUTES)
    (event,) = (event for event in world.events if isinstance(event, events.RankTimes))
    assert (event.attempt, event.num_steps, event.own_ms, sum(event.last)) == (1, 20, (0.0, 0.0), 4)


NODES = {"a": "leaves", "b": "stays", "c": "leaves"}
PREEMPTION = events.Preemption(node="leaves", deadline_s=5.0, members=("a", "c"))


@pytest.mark.parametrize(
    ("draining", "decisions"),
    [
        ({}, []),
        ({"leaves": 5.0}, [Record(PREEMPTION), Release(("a", "c"))]),
        ({"has no workers": 5.0}, []),
    ],
)
def test_workers_of_a_draining_node_are_released_once(draining: dict[str, float], decisions: list[Any]) -> None:
    supervisor = Supervisor(RecoveryConfig(), "stacks")
    assert list(supervisor.check_drains(draining, NODES)) == decisions
    assert supervisor.draining == set(draining)
    assert list(supervisor.check_drains(draining, NODES)) == []


def test_each_shortage_is_reported_once_after_ten_seconds() -> None:
    supervisor = Supervisor(RecoveryConfig(), "stacks")
    told = []
    for since_s, waited_s in ((100.0, 9.9), (100.0, 10.1), (100.0, 10.4), (200.0, 0.2), (200.0, 11.0)):
        told.append(list(supervisor.check_shortage(since_s, waited_s, 1, 2)))
    reports = [[Record(events.Waiting(workers=1, needed=2, seconds=seconds))] for seconds in (10.1, 11.0)]
    assert told == [[], reports[0], [], [], reports[1]]
