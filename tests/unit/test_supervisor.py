"""What the supervisor says and does about a world that does not get on, over reports that nobody has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import steadfast.orchestration.supervisor
from steadfast.config import RecoveryConfig, ScalingConfig
from steadfast.liveness.flight_recorder import pack
from steadfast.orchestration.coordinator import Coordinator
from steadfast.orchestration.heartbeat import Silence
from steadfast.orchestration.membership import Membership
from steadfast.orchestration.messages import Member
from steadfast.run import events
from steadfast.run.directory import RunDirectory
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from tests.support.events import event_lines

STALL_S = 60.0
SOON_S = 10.0
LEAST_S = 3.0  # the limit of a phase that usually takes moments
IN_FORWARD = ("forward", 1, 0)
COMPUTES = ("forward", 1, 1)  # inside torch, which may be a collective
WAITS = ("gradients", 4, 1)


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class World:
    """Members a, b ... of attempt 1, who report every second what the test says."""

    def __init__(self, subject: Coordinator, directory: RunDirectory, names: str, clock: Clock) -> None:
        self.subject = subject
        self.directory = directory
        self.names = names
        self.clock = clock
        self._since: dict[str, tuple[Any, float]] = {}
        self.step = 41

    @property
    def supervisor(self) -> Any:
        return self.subject._supervisor

    def live(self, seconds: float, *marks: tuple[str, int, int]) -> None:
        """Let time pass in which each member is where its mark says."""
        for tick in range(round(4 * seconds)):
            if tick % 4 == 0:
                self._report(marks)
            self.clock.now_s += 0.25
            self.supervisor._check_progress()

    def _report(self, marks: tuple[tuple[str, int, int], ...]) -> None:
        for rank, (name, mark) in enumerate(zip(self.names, marks, strict=True)):
            phase, place, inside = mark
            since = self._since.get(name)
            if since is None or since[0] != (mark, self.step):
                since = self._since[name] = ((mark, self.step), self.clock.now_s)
            report = {
                "attempt": 1,
                "rank": rank,
                "position": [self.step, 0, place, 1, inside],
                "step": self.step,
                "phase": phase,
                "seconds": self.clock.now_s - since[1],
                "limit_s": LEAST_S,
                "spent_s": {},
            }
            self.supervisor.heard(name, {"progress": report})

    def told(self) -> list[tuple[Any, ...]]:
        """Return the events about hangs, silence and failures so far."""
        with contextlib.suppress(RuntimeError):  # it is closed: all is written
            self.subject._journal._thread.submit(int).result()  # events are written in their order
        found: list[tuple[Any, ...]] = []
        for line in event_lines(self.directory):
            match line["event"]:
                case "hang":
                    found.append(("hang", line["ranks"], line["guess"], line["ends_s"]))
                case "hang_over":
                    found.append(("over", line["ranks"], round(line["seconds"])))
                case "failure":
                    found.append(("failure", line["member"], line["kind"]))
                case "silent":
                    found.append(("silent", line["member"], line["answers"], line["ends_s"]))
        return found

    @property
    def aborted(self) -> bool:
        return self.subject.heartbeats.commands.aborted == 1


def play(folder: Path, monkeypatch: pytest.MonkeyPatch, story: Callable[[World], None], names: str = "ab") -> World:
    clock = Clock()
    monkeypatch.setattr(steadfast.orchestration.supervisor, "time", clock)
    monkeypatch.setattr("ray.kill", lambda actor: None)

    async def tell() -> World:
        directory = RunDirectory(LocalStore(folder))
        directory.check_writable()
        recovery = RecoveryConfig(hang_limit_s=STALL_S)
        membership = Membership.of(ScalingConfig(num_workers=(1, len(names))), len(names))
        subject = Coordinator(recovery, membership, directory, Ownership.claim(directory.store))
        joining = [asyncio.ensure_future(subject.join(Member(name, None, name))) for name in names]
        await asyncio.gather(*joining)
        seconds = dict.fromkeys(("detected_s", "formed_s", "built_s", "restored_s", "first_step_s"), 0.5)
        subject.record(events.AttemptStarted(attempt=1, step=0, source="start", world_size=len(names), **seconds))
        world = World(subject, directory, names, clock)
        story(world)
        await subject.close()
        return world

    return asyncio.run(tell())


def test_a_rank_that_others_wait_for_is_named_within_five_seconds_and_ended_after_the_stated_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(world: World) -> None:
        world.live(5, WAITS, IN_FORWARD)
        assert world.told() == [("hang", [1], "stuck", 60.0)]
        world.live(54, WAITS, IN_FORWARD)
        assert len(world.told()) == 1
        world.live(4, WAITS, IN_FORWARD)

    world = play(tmp_path, monkeypatch, story)
    assert world.told()[1:] == [("failure", "b", "hang")]
    assert world.aborted


def test_a_forward_of_forty_seconds_is_told_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(world: World) -> None:
        for _ in range(3):
            world.live(40, WAITS, IN_FORWARD)
            world.step += 1
            world.live(2, IN_FORWARD, WAITS)
            world.step += 1

    world = play(tmp_path, monkeypatch, story)
    assert world.told() == [("hang", [1], "stuck", 60.0), ("over", [1], 40)] * 3
    assert not world.aborted


def test_where_nobody_waits_for_anybody_it_is_slow_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(world: World) -> None:
        world.live(590, IN_FORWARD, IN_FORWARD)
        assert not world.aborted
        world.live(15, IN_FORWARD, IN_FORWARD)
        assert world.aborted
        # which is enough, if they come out by themselves: to end them would lose all steps
        world.live(500, IN_FORWARD, IN_FORWARD)

    world = play(tmp_path, monkeypatch, story)
    assert world.told() == [("hang", [0, 1], "slow", 600.0)]


def test_a_world_in_which_all_may_wait_for_each_other_is_aborted_and_only_then_its_members_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(world: World) -> None:
        world.live(59, COMPUTES, COMPUTES)
        assert not world.aborted
        world.live(4, COMPUTES, COMPUTES)
        assert world.aborted
        # Nobody else holds the 41 steps.
        world.live(290, COMPUTES, COMPUTES)
        assert world.told() == [("hang", [0, 1], "all wait", 60.0)]
        world.live(20, COMPUTES, COMPUTES)

    world = play(tmp_path, monkeypatch, story)
    assert world.told()[1:] == [("failure", "a", "hang"), ("failure", "b", "hang")]


def test_of_workers_that_hang_at_the_same_place_one_after_the_other_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is more likely the step's samples than the workers."""

    def story(world: World) -> None:
        world.live(64, WAITS, WAITS, IN_FORWARD)
        world.names = "ab"
        world.live(64, WAITS, IN_FORWARD)

    world = play(tmp_path, monkeypatch, story, "abc")
    first, second = (failure.error or "" for failure in world.directory.events(events.Failure))
    assert re.fullmatch(r"hung in forward for 6\d\.\d s", first)
    assert re.fullmatch(r"hung in forward for 6\d\.\d s, as 1 before it after step 41", second)


def test_a_supervisor_that_was_stopped_gives_everybody_the_time_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(world: World) -> None:
        world.live(58, WAITS, IN_FORWARD)
        world.supervisor._patient_until_s = world.clock.now_s + 7.0
        world.live(6, WAITS, IN_FORWARD)
        assert not world.aborted
        world.live(4, WAITS, IN_FORWARD)

    assert play(tmp_path, monkeypatch, story).aborted


def test_workers_that_wake_late_have_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(world: World) -> None:
        world.supervisor.heard("a", {"stretch": 2.0})
        world.live(115, WAITS, IN_FORWARD)
        assert not world.aborted
        world.live(10, WAITS, IN_FORWARD)

    assert play(tmp_path, monkeypatch, story).aborted


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
def test_how_long_a_worker_may_be_silent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: bool,
    nobody_heard: bool,
    saved: int,
    expected_s: float,
) -> None:
    def story(world: World) -> None:
        world.live(0.25, WAITS, IN_FORWARD)
        world.supervisor._costs._step_s = 2.0
        if saved:
            world.subject.record(events.Checkpoint(step=saved, path="x", seconds=1.0, blocked_s=0.0, bytes=1))
        for seconds in (4.9, 5.5):
            silence = Silence(seconds, answers, nobody_heard, stretch=1.0)
            assert world.supervisor.patience("a", silence) == pytest.approx(expected_s)

    world = play(tmp_path, monkeypatch, story)
    assert world.told() == [("silent", "a", answers, expected_s)]
    assert not world.aborted


def test_collectives_are_written_by_rank_as_torchs_tool_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(world: World) -> None:
        world.live(1, WAITS, IN_FORWARD)
        for name in "ba":
            world.supervisor.heard(name, {"collectives": pack(f"of {name}".encode())})
        world.supervisor._writing.shutdown()

    play(tmp_path, monkeypatch, story)
    folder = tmp_path / "stacks" / "attempt-1-collectives"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"rank-0": "of a", "rank-1": "of b"}


def test_stacks_are_written_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(world: World) -> None:
        world.supervisor.heard("a", {"stacks": "File x, line 1"})
        world.supervisor._writing.shutdown()

    world = play(tmp_path, monkeypatch, story)
    assert (tmp_path / "stacks" / "attempt-1-a.txt").read_text() == "File x, line 1"
    assert world.told() == []


def test_what_a_step_costs_each_rank_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(world: World) -> None:
        for _ in range(25):
            world.step += 1
            world.live(1, COMPUTES, COMPUTES)

    world = play(tmp_path, monkeypatch, story)
    (line,) = [line for line in event_lines(world.directory) if line["event"] == "rank_times"]
    assert (line["attempt"], line["num_steps"], line["own_ms"], sum(line["last"])) == (1, 20, [0.0, 0.0], 4)


def watch(folder: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Coordinator], object]) -> RunDirectory:
    """Have a coordinator watch until its run is over, after `begin`."""
    monkeypatch.setattr(steadfast.orchestration.supervisor, "draining_nodes", dict)
    monkeypatch.setattr(steadfast.orchestration.supervisor, "_INTERVAL_S", 0.01)
    directory = RunDirectory(LocalStore(folder))
    directory.check_writable()

    async def tell() -> None:
        membership = Membership.of(ScalingConfig(num_workers=(1, 2)), 2)
        subject = Coordinator(RecoveryConfig(), membership, directory, Ownership.claim(directory.store))
        begin(subject)
        await asyncio.wait_for(subject._supervisor.watch(), SOON_S)
        await subject.close()

    asyncio.run(tell())
    return directory


def test_a_run_that_another_command_has_taken_over_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "another command has taken over: on elsewhere, pid 1"
    directory = watch(tmp_path, monkeypatch, lambda subject: setattr(subject._ownership, "lost", why))
    (failure,) = directory.events(events.Failure)
    assert (failure.kind, failure.fatal, failure.error) == ("ours", True, why)


def test_a_look_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = RunDirectory.pop_scale_request
    looks: list[int] = []

    def look(directory: RunDirectory) -> tuple[int, int] | None:
        looks.append(1)
        if len(looks) == 1:
            raise ZeroDivisionError
        return honest(directory)

    def begin(subject: Coordinator) -> None:
        subject._directory.request_scale(1, 1)
        record = subject.record
        # The answer is all that is waited for.
        monkeypatch.setattr(subject, "record", lambda event: (record(event), setattr(subject, "over", True)))

    monkeypatch.setattr(RunDirectory, "pop_scale_request", look)
    directory = watch(tmp_path, monkeypatch, begin)
    assert [event.after for event in directory.events(events.Scale)] == [(1, 1)]
    assert "ZeroDivisionError" in capsys.readouterr().err
