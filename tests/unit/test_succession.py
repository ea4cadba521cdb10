"""A coordinator that takes over from one that was killed, without Ray: what it knows, and what it does to workers."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from steadfast.config import RecoveryConfig, ScalingConfig
from steadfast.guards.failures import FailureKind
from steadfast.orchestration.coordinator import Coordinator
from steadfast.orchestration.heartbeat import Commands
from steadfast.orchestration.membership import Membership
from steadfast.orchestration.messages import FailureReport, Leave, Member, WorldAssignment
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import AttemptEnded, AttemptStarted, Checkpoint, Failure, Notice, RunStarted, Scale
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from tests.support.events import LOG, changed, event_lines

SILENCE_S = 0.1
HANGS_S = 5.0
NONE = Commands()
SECONDS = dict.fromkeys(("detected_s", "formed_s", "built_s", "restored_s", "first_step_s"), 0.0)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.kill", lambda actor: None)
    monkeypatch.setattr("steadfast.orchestration.coordinator.draining_nodes", dict)


@dataclass
class Line:
    """The coordinators of one command, of which one at a time lives, and the last place of each worker."""

    directory: RunDirectory
    ownership: Ownership
    places: dict[str, WorldAssignment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.subject = self.born()

    def born(self) -> Coordinator:
        """Return a coordinator as Ray starts it: each time with what the command had at its start."""
        at_the_start = Ownership(self.ownership._store, self.ownership._owner)
        recovery = RecoveryConfig(silence_s=SILENCE_S, max_failures=2)
        membership = Membership.of(ScalingConfig(num_workers=(1, 3)), 3)
        return Coordinator(recovery, membership, self.directory, at_the_start)

    async def die(self) -> None:
        """Have the coordinator's process killed, and another one started."""
        old = self.subject
        for task in [*old._tasks, old._started]:
            if task is not None:
                task.cancel()
        if hasattr(old.heartbeats, "_server"):
            old.heartbeats._server.close()
        await old.close()  # of a file, which the kernel does
        self.subject = self.born()

    async def form(self, *names: str) -> None:
        places = await asyncio.gather(*(self.subject.join(member(name)) for name in names))
        self.places = {name: place for name, place in zip(names, places, strict=True) if not isinstance(place, Leave)}

    async def come_back(self, *names: str, commands: Commands = NONE) -> list[bool]:
        return [await self.subject.rejoin(member(name), self.places.get(name), commands) for name in names]

    async def survive(self, *names: str) -> None:
        """Report from each of these that a peer is lost, and have them form the next world."""
        report = FailureReport(FailureKind.PEER, 1, 7, "Connection closed by peer", "")
        reports = [asyncio.ensure_future(self.subject.failed(name, report)) for name in names]
        await self.come_back(*names)
        assert not any([await each for each in reports])
        await self.form(*names)

    def told(self, name: str) -> list[dict[str, Any]]:
        return [line for line in event_lines(self.directory) if line["event"] == name]


def member(name: str) -> Member:
    return Member(name, None, "node", store=(f"host of {name}", 1))


def play(folder: Path, story: Callable[[Line], Awaitable[None]]) -> Line:
    async def tell() -> Line:
        directory = RunDirectory(LocalStore(folder))
        directory.check_writable()
        line = Line(directory, Ownership.claim(directory.store))
        directory.record(RunStarted(launcher="ray"))
        await story(line)
        await line.die()
        await line.subject.close()
        return line

    return asyncio.run(asyncio.wait_for(tell(), 30))


async def soon(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


def test_workers_that_come_back_go_on_in_their_world_untold(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        await line.die()
        slots = asyncio.ensure_future(line.subject.num_slots())
        assert await line.come_back("a", "b", "c") == [True] * 3
        assert await slots == 3
        assert line.subject.membership.world == ("c", "b", "a")
        assert line.subject._running == 1
        assert line.subject.heartbeats.commands == NONE
        # And the next death is one as any other.
        line.subject.lose("b", "connection closed")
        assert line.subject.heartbeats.commands.aborted == 1

    line = play(tmp_path, story)
    assert [told["follows"] for told in line.told("process_restarted")] == [
        "another one has taken its place, and 3 of 3 workers go on"
    ]
    assert [failure["member"] for failure in line.told("failure")] == ["b"]


def test_one_that_died_with_the_coordinator_is_lost_once_its_world_stands_still(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        await line.die()
        await line.survive("a", "b")
        assert {name: place.rank for name, place in line.places.items()} == {"b": 0, "a": 1}
        assert {place.attempt for place in line.places.values()} == {2}
        assert await line.come_back("c") == [False]
        assert await line.subject.join(member("c")) is Leave.RELEASED

    line = play(tmp_path, story)
    (failure,) = line.told("failure")
    assert (failure["member"], failure["kind"]) == ("c", "worker")


def test_where_storage_does_not_say_who_trains_the_workers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But nobody can name the one that died."""

    def refuse(_: Ownership) -> None:
        raise OSError("storage is gone")

    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        with monkeypatch.context() as patch:
            patch.setattr(Ownership, "renew", refuse)
            await line.die()
        await line.survive("a", "c")
        assert {name: place.rank for name, place in line.places.items()} == {"c": 0, "a": 1}

    (failure,) = play(tmp_path, story).told("failure")
    assert (failure["member"], failure["rank"]) == ("of rank 1", 1)


def test_a_world_of_which_nobody_was_told_before_the_coordinator_died_does_not_count(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        line.subject._ownership.next_attempt(("c", "b", "new"))
        await line.die()
        slots = asyncio.ensure_future(line.subject.num_slots())
        await line.come_back("a", "b", "c")
        assert await slots == 3
        assert line.subject.membership.world == ("c", "b", "a")

    assert play(tmp_path, story).told("failure") == []


def test_while_all_others_train_nobody_is_taken_for_dead_and_if_none_comes_back_newcomers_begin(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        await line.die()
        slots = asyncio.ensure_future(line.subject.num_slots())
        await line.come_back("a", "b")
        await asyncio.sleep(4 * SILENCE_S)
        assert not slots.done()
        assert await line.come_back("c") == [True]
        assert await slots == 3
        await line.die()
        await line.form("d", "e", "f")
        assert {place.attempt for place in line.places.values()} == {2}

    assert play(tmp_path, story).told("failure") == []


def test_a_world_that_formed_as_the_coordinator_died_forms_again(tmp_path: Path) -> None:
    """Only `c` was told of the second world: the others' calls are repeated, and they know of the first alone."""

    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        first = dict(line.places)
        await line.form("c", "b", "a")
        line.places = {**first, "c": line.places["c"]}
        await line.die()
        waiting = [asyncio.ensure_future(line.subject.join(member(name))) for name in "ab"]
        await line.come_back("a", "b", "c")
        await soon(lambda: line.subject.heartbeats.commands.aborted == 2)
        answers = await asyncio.gather(line.subject.join(member("c")), *waiting)
        assert {answer.attempt for answer in answers if not isinstance(answer, Leave)} == {3}

    assert play(tmp_path, story).told("failure") == []


def test_bounds_budgets_failures_and_numbers_of_events_are_kept(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        await line.subject.publish(AttemptStarted(attempt=1, step=0, source="start", world_size=3, **SECONDS))
        line.subject.record(Scale(before=(1, 3), after=(1, 2)))
        line.subject.record(Failure(kind="oom", member="x", step=5, error="out of memory"))
        line.subject.record(Failure(kind="oom", member="y", step=5, error="out of memory elsewhere"))
        seen = await line.subject.events(0, stop=False)
        assert [event.name for event in seen] == ["attempt_started", "scale", "failure", "failure"]
        line.subject.record(AttemptEnded(attempt=1, cause="exception", step=5))
        await line.die()

        assert [event.name for event in await line.subject.events(4, stop=False)] == ["attempt_ended"]
        assert line.subject.membership.largest == 2
        assert line.subject._budgets.spend("oom", 5) is not None
        await line.come_back("a", "b", "c")
        report = FailureReport(FailureKind.EXCEPTION, 2, 5, "out of memory", "")
        line.subject._judge("z", report)
        assert line.subject.over, "the same failure at the same step"

    play(tmp_path, story)


def test_a_call_that_ray_repeats_counts_once(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        saved = Checkpoint(attempt=1, time_s=1.5, step=3, path="p", seconds=1, blocked_s=0, bytes=1)
        # Notices at the beginning of an attempt may have one time.
        first, second = (Notice(attempt=1, time_s=1.5, text=text) for text in ("first", "second"))
        await line.subject.publish(saved)
        await line.subject.publish(first)
        report = FailureReport(FailureKind.EXCEPTION, 1, 3, "ValueError: bug", "Traceback: ...")
        await line.subject.failed("a", report)
        await line.die()
        calls = [line.subject.publish(event) for event in (saved, first, second)]
        repeated = asyncio.gather(*calls, line.subject.failed("a", report))
        await line.come_back("a", "b", "c")
        await repeated
        assert not line.subject.over

    line = play(tmp_path, story)
    assert len(line.told("checkpoint")) == 1
    assert [notice["text"] for notice in line.told("notice")] == ["first", "second"]


def test_a_stop_outlives_the_coordinator_that_was_told(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        await line.subject.events(0, stop=True)
        commands = line.subject.heartbeats.commands
        await line.die()
        await line.come_back("a", "b", "c", commands=replace(commands, leave=1))
        assert await line.subject.num_slots() == 3  # they have something to save
        assert line.subject.heartbeats.commands == Commands(stop=True, leave=1)
        assert await line.subject.join(member("new")) is Leave.RUN_ENDED

    play(tmp_path, story)


def test_events_that_the_driver_has_shown_are_forgotten(tmp_path: Path) -> None:
    async def story(line: Line) -> None:
        shown = 0
        for number in range(200):
            line.subject.record(changed(LOG, step=number))
            if number % 10 == 0:
                line.subject.record(AttemptEnded(attempt=number, cause="resized"))
            told = await line.subject.events(shown, stop=False)
            assert [event.name for event in told] == ["log", "attempt_ended"][: 1 + (number % 10 == 0)]
            shown += sum(event.kept for event in told)
            assert len(line.subject._journal._news) <= 1

    play(tmp_path, story)


def test_a_coordinator_answers_while_storage_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def hang(*_: object) -> Any:
        answers.wait()
        return {}

    async def story(line: Line) -> None:
        await line.form("c", "b", "a")
        line.directory.store.commit(STEPS, json.dumps({"step": 3}).encode() + b"\n")
        for name in ("write", "commit", "read"):
            monkeypatch.setattr(LocalStore, name, hang)
        monkeypatch.setattr(line.subject._journal._file, "write", hang)
        monkeypatch.setattr(RunDirectory, "last_step_line", hang)
        releasing = threading.Timer(HANGS_S, answers.set)  # also where the event loop hangs with it
        releasing.start()
        publishing = asyncio.ensure_future(line.subject.publish(AttemptEnded(attempt=1, cause="resized")))
        line.subject.lose("a", "connection closed")
        joining = [asyncio.ensure_future(line.subject.join(member(name))) for name in "cb"]
        line.subject._heard("c", {"stacks": "..."})
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not answers.is_set(), "the coordinator has waited for storage"
        assert not any(each.done() for each in (publishing, *joining))
        monkeypatch.undo()
        answers.set()
        releasing.cancel()
        releasing.join()
        assert [answer.attempt for answer in await asyncio.gather(*joining) if not isinstance(answer, Leave)] == [2, 2]
        await publishing

    play(tmp_path, story)
