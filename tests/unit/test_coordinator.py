"""The coordinator without Ray: those who were cut off and come back, and workers that cannot reach each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from steadfast.config import RecoveryConfig, ScalingConfig
from steadfast.errors import StorageError
from steadfast.guards.failures import FailureKind
from steadfast.orchestration import coordinator
from steadfast.orchestration.coordinator import Coordinator
from steadfast.orchestration.heartbeat import Commands, Silence, _proof
from steadfast.orchestration.membership import Membership
from steadfast.orchestration.messages import FailureReport, Leave, Member, WorldAssignment
from steadfast.orchestration.supervisor import Abort, Dump, Lose, Record, Release
from steadfast.orchestration.trainer import Fit, HeadDied, RayDied
from steadfast.plan import End
from steadfast.run import events
from steadfast.run.directory import STEPS, Request, RunDirectory
from steadfast.run.owner import Ownership, read_owner
from steadfast.storage import LocalStore
from steadfast.storage.documents import write_json
from tests.support.events import attempt_started, event_lines, notices


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.kill", lambda actor: None)


async def cut_c_off(worlds: Worlds) -> None:
    """Take c for dead, and let the others go on without it in a second attempt."""
    await worlds.form()
    worlds.subject.lose("c", "not heard of for 5 s")
    await worlds.fail("a", "b")
    await worlds.form()
    assert worlds.attempt == 2


@pytest.mark.parametrize(
    ("name", "kind", "attempt"), [*(("c", kind, 1) for kind in FailureKind), ("new", FailureKind.EXCEPTION, 0)]
)
def test_failure_outside_of_the_world_ends_nothing(tmp_path: Path, name: str, kind: FailureKind, attempt: int) -> None:
    async def story(worlds: Worlds) -> None:
        await cut_c_off(worlds)
        report = FailureReport(kind, attempt, step=7, message="another attempt has taken over", traceback="")
        assert not await worlds.subject.failed(name, report)

    assert [ended.attempt for ended in play(tmp_path, story).directory.events(events.AttemptEnded)] == [1]


def test_a_lost_worker_is_not_let_in_and_what_it_finished_alone_does_not_count(tmp_path: Path) -> None:
    async def story(worlds: Worlds) -> None:
        await cut_c_off(worlds)
        await worlds.subject.publish(events.Finished(attempt=1, summary={"step": 9}))
        worlds.subject.lose("new", "not heard of for 5 s")  # before it came
        for name in ("c", "new", "new"):
            assert await worlds.subject.join(Member(name, None, name)) is Leave.RELEASED

    worlds = play(tmp_path, story)
    assert worlds.told() == [("worker", "c", False), ("worker", "new", False)]
    assert worlds.directory.events(events.Finished) == []
    assert not worlds.subject.over


def test_memory_that_runs_out_is_charged_to_nobody_and_the_next_world_runs_smaller_forwards(tmp_path: Path) -> None:
    async def story(worlds: Worlds) -> None:
        await worlds.form()
        for name, size in (("a", 4), ("b", 4), ("c", 6)):
            report = FailureReport(FailureKind.SMALLER, worlds.attempt, 7, "CUDA out of memory.", "", forward_size=size)
            assert not await worlds.subject.failed(name, report)
        places = await asyncio.gather(*(worlds.subject.join(Member(name, None, name)) for name in "abc"))
        assert [place.amendments.forward_size for place in places if isinstance(place, WorldAssignment)] == [4] * 3

    worlds = play(tmp_path, story)
    assert worlds.told() == []
    (shrunk,) = worlds.directory.events(events.ForwardsShrunk)
    assert (shrunk.step, shrunk.forward_size, shrunk.error) == (8, 4, "CUDA out of memory.")
    assert shrunk.rank == worlds.subject.membership.rank_of("a")
    (ended,) = worlds.directory.events(events.AttemptEnded)
    assert ended.cause == "out of memory"
    assert worlds.directory.amendments().forward_size == 4


CAUSE = "step 8: rank 1 (host n, cpu) computes wrongly: ..."


async def find_b_wrong(worlds: Worlds, first: str) -> list[bool]:
    """All three find out in step 8 that b computes wrongly, `first` before the others."""
    rank = worlds.subject.membership.rank_of("b")
    report = FailureReport(FailureKind.CORRUPTION, worlds.attempt, 7, CAUSE, "", corrupted=rank)
    return [await worlds.subject.failed(name, report) for name in (first, *sorted(set("abc") - {first}))]


@pytest.mark.parametrize("first", ["a", "b", "c"])
def test_a_member_that_computes_wrongly_is_killed_and_charged_once_whoever_tells_it_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr("ray.kill", killed.append)

    async def story(worlds: Worlds) -> None:
        await worlds.form()
        worlds.subject.members["b"] = Member("b", "the actor of b", "node of b")
        assert await find_b_wrong(worlds, first) == [False] * 3
        assert worlds.subject._corrupted_nodes == {"node of b"}
        assert await worlds.subject.join(Member("b", None, "b")) is Leave.RELEASED
        await worlds.form()  # of those who are left
        assert worlds.subject.membership.world in (("a", "c"), ("c", "a"))

    worlds = play(tmp_path, story)
    assert killed == ["the actor of b"]
    assert worlds.told() == [("corruption", "b", False)]
    (failure,) = worlds.directory.events(events.Failure)
    assert (failure.node, failure.error) == ("node of b", "computed wrongly in step 8")
    ended = worlds.directory.events(events.AttemptEnded)
    assert ended[0].cause == "corruption"


def test_a_coordinator_that_takes_over_knows_on_which_nodes_a_result_was_wrong_or_no_worker_joined(
    tmp_path: Path,
) -> None:
    RunDirectory(LocalStore(tmp_path)).record(events.RunStarted(launcher="ray"))
    for kind, node, member in (("corruption", "bad", "b"), ("worker", "good", "b"), ("device", "without", None)):
        RunDirectory(LocalStore(tmp_path)).record(events.Failure(kind=kind, member=member, node=node, error="..."))

    async def story(worlds: Worlds) -> None:
        worlds.subject.heartbeat_port = AsyncMock()
        report = FailureReport(FailureKind.WORKER, 0, 0, "killed", "")
        assert worlds.subject._unready == {"without": "..."}
        for node, wrong in (("good", False), ("bad", True)):
            assert await worlds.subject.ended(Member("", None, node), report, set(), alone=True) is wrong

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("node", "num_gpus", "alone", "startable", "code"),
    [
        ("broken", 1, True, [], 2),
        ("other", 0, True, [], 2),  # such as a head that only coordinates
        ("other", 1, True, [], None),
        ("broken", 8, False, [], None),  # another worker may use another GPU of the node
        ("broken", 1, True, [{"GPU": 1}], None),  # the autoscaler may start another node
    ],
)
def test_run_ends_with_torchs_sentence_if_no_worker_has_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, num_gpus: int, alone: bool, startable: Any, code: Any
) -> None:
    nodes = [{"NodeID": "broken", "Alive": True, "Resources": {"GPU": 1}}]
    nodes.append({"NodeID": node, "Alive": True, "Resources": {"GPU": num_gpus} if num_gpus else {}})
    nodes.append({"NodeID": "dead", "Alive": False, "Resources": {"GPU": 1}})
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(coordinator, "startable", lambda: startable)

    async def story(worlds: Worlds) -> None:
        worlds.subject.heartbeat_port = AsyncMock()
        report = FailureReport(FailureKind.DEVICE, 0, 0, "no NVIDIA driver", "Traceback: ...")
        await worlds.subject.ended(Member("", None, "broken", pid=7), report, {"GPU"}, alone)
        assert worlds.subject.over == (code == 2)

    (failure,) = play(tmp_path, story).directory.events(events.Failure)
    assert (failure.node, failure.kind, failure.fatal) == ("broken", "device", code == 2)
    error = fit_at(tmp_path)._explained(failure)
    assert (error.exit_code, str(error)) == (2, "no NVIDIA driver")


def test_world_goes_on_without_a_worker_whose_gpu_is_gone(tmp_path: Path) -> None:
    async def story(worlds: Worlds) -> None:
        worlds.subject.heartbeat_port = AsyncMock()
        await worlds.form(starts=True)
        worlds.subject.lose("b", "connection closed")  # its GPU has fallen off
        await worlds.fail("a", "c")
        # So has that of the workers that take its place.
        report = FailureReport(FailureKind.DEVICE, 0, 0, "no NVIDIA driver", "")
        for pid in (7, 8):
            await worlds.subject.ended(Member("", None, "b", pid=pid), report, {"GPU"}, alone=False)
        await worlds.form(starts=True)
        assert not worlds.subject.over
        assert sorted(worlds.subject.membership.world) == ["a", "c"]

    assert play(tmp_path, story).told() == [("worker", "b", False), ("device", None, False)]


ERROR = "PeerLost: forming a world of 3 failed: NCCL error\nLast error:\nBootstrap : no socket interface found"
LONG_S = 60.0  # nobody can wait so long here for the news of a death
SHORT_S = 0.05  # news of a death that come later are none


@dataclass
class Worlds:
    """Three workers, a, b and c, that make world after world, and report together how each one breaks."""

    subject: Coordinator
    directory: RunDirectory
    attempt: int = 0

    async def form(self, starts: bool = False, step: int = 0) -> None:
        """Form the next world. It `starts` if it finishes a step; `step` is the furthest one in the ledger."""
        # The one that may be new comes first: survivors would not wait for it.
        names = [name for name in ("c", "b", "a") if name not in self.subject._dead]
        members = [Member(name, None, name, pid=ord(name), host=f"host of {name}") for name in names]
        places = await asyncio.gather(*map(self.subject.join, members))
        (self.attempt,) = {place.attempt for place in places if isinstance(place, WorldAssignment)}
        if starts:
            await self.subject.publish(attempt_started(self.attempt, world_size=3))
        if step:
            self.directory.store.commit(STEPS, json.dumps({"step": step}).encode() + b"\n")

    async def fail(self, *names: str, kind: FailureKind = FailureKind.PEER) -> list[bool]:
        """Report the end of the attempt for `names`, all at once. Return what each is told: if the run is over."""
        report = FailureReport(kind, self.attempt, 7, ERROR, "Traceback: ...")
        reports = [self.subject.failed(name, report) for name in names]
        return await asyncio.wait_for(asyncio.gather(*reports), LONG_S / 2)

    def told(self) -> list[tuple[str, str | None, bool]]:
        """Return kind, worker and whether it was fatal, for each failure so far."""
        lines = [event for event in event_lines(self.directory) if event["event"] == "failure"]
        return [(line["kind"], self._named(line), line["fatal"]) for line in lines]

    def _named(self, line: dict[str, Any]) -> str | None:
        """Return the worker of a failure. Where all cannot communicate, any of them may be the first to be heard."""
        everyone = line["kind"] == "communication" and line.get("member") in ("a", "b", "c")
        return "one of them" if everyone else line.get("member")


def play(
    folder: Path,
    story: Callable[[Worlds], Awaitable[None]],
    silence_s: float = SHORT_S,
    max_failures: int = 10,
) -> Worlds:
    """Return what has become of three workers after `story`."""

    async def tell() -> Worlds:
        directory = RunDirectory(LocalStore(folder))
        directory.check_writable()
        recovery = RecoveryConfig(silence_s=silence_s, hang_limit_s=silence_s, max_failures=max_failures)
        membership = Membership.of(ScalingConfig(num_workers=(1, 3)), 3)
        subject = Coordinator(recovery, membership, directory, Ownership.claim(directory.store))
        worlds = Worlds(subject, directory)
        await story(worlds)
        await subject.close()
        return worlds

    return asyncio.run(tell())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.orchestration.coordinator._DEATH_NEWS_S", 0.01)


SAME = "No module named 'einops'"
NEVER_JOINED = {
    "one node": (["xx"], "ours", [("x", False)]),
    "every node": (["x", "y"], "ours", [("x", False), ("y", True)]),
    "one GPU": (["x"], "device", [("x", False)]),
    "every GPU": (["x", "y"], "device", [("x", False), ("y", True)]),
    "raised once everywhere": (["x", "y"], "exception", [("x", False), ("y", True)]),
    "killed": (["x", "y", "x", "y", "x"], "worker", [("x", False), ("y", False), ("x", True)]),
    "killed at a time when others train": (["x", "y"] * 9, "worker", [("x", False), ("y", False)]),
    "a node that is about to go": (["gone"], "worker", []),
}


@pytest.mark.parametrize("case", NEVER_JOINED)
def test_coordinator_reports_each_node_whose_workers_cannot_join_and_ends_if_nobody_can(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, kind, told = NEVER_JOINED[case]
    alive = [{"NodeID": node, "Alive": node != "dead", "Resources": {"CPU": 1}} for node in ("x", "y", "dead")]
    monkeypatch.setattr("ray.nodes", lambda: alive)

    async def story(worlds: Worlds) -> None:
        worlds.subject.heartbeat_port = AsyncMock()
        worlds.subject._supervisor.draining.add("gone")
        if "others train" in case:
            await worlds.form()
        for node in "".join(nodes) if "gone" not in nodes else nodes:
            report = FailureReport(FailureKind(kind), 0, 0, SAME, "")
            await worlds.subject.ended(Member("", None, node, pid=7, host="h"), report, {"CPU"}, alone=True)
        await worlds.subject.ask(Member("n", None, "x", pid=8), 0)
        await worlds.subject.ended(Member("", None, "x", pid=8), report, set(), alone=True)  # a worker that has joined

    worlds = play(tmp_path, story, max_failures=1)
    failures = worlds.directory.events(events.Failure)
    assert [(failure.node, failure.fatal) for failure in failures] == told
    assert all(failure.error == SAME and failure.kind == kind for failure in failures)
    assert worlds.subject.over == any(fatal for _, fatal in told)
    if case == "killed":
        assert failures[-1].budget == "5 failures (before joining) and no step beyond 0; recovery allows 4 in a row"


async def a_death_before(worlds: Worlds) -> None:
    worlds.subject.lose("c", "connection closed")
    await worlds.fail("a", "b")


async def a_death_a_moment_later(worlds: Worlds) -> None:
    reports = asyncio.ensure_future(worlds.fail("a", "b"))
    await asyncio.sleep(0.1)
    assert worlds.told() == []
    worlds.subject.lose("c", "not heard of for 5 s")
    await reports


async def a_hang_of_all(worlds: Worlds) -> None:
    worlds.subject.abort()
    await worlds.fail("a", "b", "c")


async def a_planned_resize(worlds: Worlds) -> None:
    worlds.subject.dismiss(worlds.subject.membership.send_away(["c"]), Leave.RELEASED)
    await worlds.fail("a", "b")


async def one_that_has_left(worlds: Worlds) -> None:
    reports = asyncio.ensure_future(worlds.fail("a", "b"))
    await asyncio.sleep(0.1)
    await worlds.subject.leave("c")
    await reports


async def an_exception_of_another(worlds: Worlds) -> None:
    await asyncio.gather(worlds.fail("a", "b"), worlds.fail("c", kind=FailureKind.EXCEPTION))


async def a_death_that_is_told_after_the_next_world_has_formed(worlds: Worlds) -> None:
    await a_death_before(worlds)
    former = FailureReport(FailureKind.PEER, worlds.attempt, 7, ERROR, "")
    await worlds.form()
    await worlds.subject.failed("b", former)


EXPLAINED = {
    a_death_before: [("worker", "c", False)],
    a_death_a_moment_later: [("worker", "c", False)],
    a_hang_of_all: [],
    a_planned_resize: [],
    one_that_has_left: [],
    an_exception_of_another: [("exception", "c", False)],
    a_death_that_is_told_after_the_next_world_has_formed: [("worker", "c", False)],
}


@pytest.mark.parametrize(("what", "failures"), EXPLAINED.items(), ids=[what.__name__ for what in EXPLAINED])
def test_survivors_are_not_charged_for_what_has_ended_their_world_and_do_not_wait(
    tmp_path: Path, what: Callable[[Worlds], Awaitable[None]], failures: list[Any]
) -> None:
    ranks: tuple[str, ...] = ()

    async def story(worlds: Worlds) -> None:
        nonlocal ranks
        await worlds.form()
        ranks = worlds.subject.membership.world
        await what(worlds)

    worlds = play(tmp_path, story, silence_s=LONG_S)
    assert worlds.told() == failures
    assert not worlds.subject.over
    for event in worlds.directory.events(events.Failure):
        assert (event.rank, event.pid, event.host) == (ranks.index("c"), ord("c"), "host of c")


@pytest.mark.usefixtures("quick")
def test_two_worlds_without_a_step_end_the_run_with_the_error_and_what_to_do(tmp_path: Path) -> None:
    async def story(worlds: Worlds) -> None:
        for is_over in (False, True):
            await worlds.form()
            assert await worlds.fail("a", "b", "c") == [is_over] * 3
        assert await worlds.subject.join(Member("a", None, "a")) is Leave.RUN_ENDED

    worlds = play(tmp_path, story)
    charged = ("communication", "one of them", False)
    assert worlds.told() == [charged, charged, ("communication", None, True)]
    first, _, fatal = worlds.directory.events(events.Failure)
    assert (first.error, first.traceback, first.step) == (ERROR, "Traceback: ...", 7)
    assert "no socket interface found" in first.line()
    assert worlds.directory.events(events.AttemptEnded)[0].cause == "communication failed"
    for part in (ERROR, "2 attempts in a row", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG=INFO"):
        assert part in fatal.error


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dies", [False, True])
def test_worlds_that_finish_steps_in_between_go_on(tmp_path: Path, dies: bool) -> None:
    living, charged = "abc", ("communication", "one of them", False)
    if dies:
        living, charged = "ab", ("worker", "c", False)

    async def story(worlds: Worlds) -> None:
        for number in range(1, 7):
            await worlds.form(starts=number % 2 == 0, step=number)
            if dies:
                worlds.subject.lose("c", "connection closed")
            await worlds.fail(*living)
            worlds.subject._dead.clear()  # another one takes its name

    worlds = play(tmp_path, story, max_failures=1)
    assert worlds.told() == [charged] * 6
    assert not worlds.subject.over


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("max_failures", "is_wrong"), [(0, False), (3, False), (3, True)])
def test_failures_that_no_death_explains_end_the_run_within_its_budget(
    tmp_path: Path, max_failures: int, is_wrong: bool
) -> None:
    """Each world does the same step again, so that it is the budget that ends the run."""

    async def story(worlds: Worlds) -> None:
        for _ in range(1000):
            if worlds.subject.over:
                break
            await worlds.form(starts=True, step=5)
            if is_wrong:
                await find_b_wrong(worlds, "a")
                await asyncio.sleep(0.05)  # for the ledger to be looked at
                del worlds.subject._dead["b"]  # another one takes its name
            else:
                await worlds.fail("a", "b", "c")

    worlds = play(tmp_path, story, max_failures=max_failures)
    kind, charged = ("corruption", "b") if is_wrong else ("communication", "one of them")
    assert worlds.told() == [(kind, charged, False)] * (max_failures + 1) + [(kind, None, True)]
    *_, fatal = worlds.directory.events(events.Failure)
    failures = f"{max_failures + 1} failures ({kind})"
    assert fatal.budget == f"{failures} and no step beyond 5; recovery allows {max_failures} in a row"
    assert (fatal.budget if is_wrong else ERROR) in fatal.error


async def lose_two(worlds: Worlds, late: bool) -> None:
    """Lose b and c, either both before a survivor reports the end of the attempt, or c `late`, after that."""
    await worlds.form(starts=True, step=5)
    worlds.subject.lose("b", "connection closed")
    if not late:
        worlds.subject.lose("c", "connection closed")
    await worlds.fail("a")
    worlds.subject.lose("c", "connection closed")
    await asyncio.sleep(SHORT_S)  # for the ledger to be looked at


@pytest.mark.parametrize("late", [False, True])
def test_coordinator_charges_losses_of_one_attempt_once(tmp_path: Path, late: bool) -> None:
    async def story(worlds: Worlds) -> None:
        await lose_two(worlds, late)
        assert not worlds.subject.over
        worlds.subject._dead.clear()  # others take their names
        await lose_two(worlds, late)

    worlds = play(tmp_path, story, silence_s=LONG_S, max_failures=1)
    assert [member for kind, member, fatal in worlds.told() if not fatal] == ["b", "c"] * 2
    (fatal,) = (event for event in worlds.directory.events(events.Failure) if event.fatal)
    assert fatal.error == "2 failures (worker) and no step beyond 5; recovery allows 1 in a row"
    assert fatal.kind == "worker"  # not "ours", which would be bad usage before the first step


def fit_at(folder: Path, coordinator: Any = None, make: Any = None, stopping: bool = False, cluster: str = "") -> Fit:
    """Return what a command does with its run, without a command's cluster."""
    interrupts = Mock(stopping=stopping)
    directory = RunDirectory(LocalStore(folder))
    return Fit(make, coordinator, directory, Mock(), interrupts, 2, 2, cluster, only_saves=False)


@pytest.mark.parametrize(
    ("kind", "traceback", "step", "code", "says"),
    [
        ("hang", "", 0, 1, "3 failures"),  # a budget is exceeded
        ("communication", "", 0, 1, "3 failures"),
        ("exception", "Traceback ...", 0, 1, "Traceback ..."),
        ("ours", "", 0, 2, "3 failures"),  # bad input
        ("ours", "", 7, 1, "3 failures"),
    ],
)
def test_command_ends_with_one_unless_its_input_was_bad_before_the_first_step(
    tmp_path: Path, kind: str, traceback: str, step: int, code: int, says: str
) -> None:
    if step:
        LocalStore(tmp_path).commit(STEPS, json.dumps({"step": step}).encode() + b"\n")
    error = fit_at(tmp_path)._explained(events.Failure(kind=kind, error="3 failures", traceback=traceback, fatal=True))
    assert (error.exit_code, str(error)) == (code, says)


@pytest.mark.parametrize("error", [HeadDied("dead. Start it"), StorageError("full. Make room")])
def test_an_error_with_a_remedy_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(Fit, "_fit", lambda self: setattr(self, "_error", error))
    monkeypatch.setattr("ray.get", Mock())
    with pytest.raises(type(error), match=f"^{error}$"):
        fit_at(tmp_path, Mock()).result()


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 3), (None, 3)])
def test_command_ends_with_three_when_its_run_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str | None, code: int
) -> None:
    monkeypatch.setattr(Fit, "_fit", lambda self: None)
    monkeypatch.setattr("steadfast.orchestration.trainer.ray.get", lambda asked, timeout: None)
    fit = fit_at(tmp_path, Mock(), stopping=True)
    fit._summary = {"status": status} if status else None
    assert fit.result() == code


@pytest.mark.parametrize(("cluster", "raised"), [("", RayDied), ("10.0.0.1:6379", None)])
def test_command_comes_back_if_an_embedded_raylet_has_left_its_cluster_and_still_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, raised: type[Exception] | None
) -> None:
    """As a raylet does whose agent has died; the controller has died with it, and another one is to start."""

    def refuse() -> Any:
        raise HeadDied("the cluster's head node is dead")

    monkeypatch.setattr(Fit, "_show_events", lambda self: None)
    monkeypatch.setattr(Fit, "_cluster_answers", lambda self: True)
    fit = fit_at(tmp_path, make=refuse, cluster=cluster)
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        fit._fit()
    assert isinstance(fit._error, HeadDied)


def test_the_signal_that_stops_the_run_is_published_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.orchestration.trainer.ray.wait", lambda asked, timeout: ([], asked))
    coordinator = Mock()
    fit = fit_at(tmp_path, coordinator, stopping=True)
    fit._say_stopping("SIGTERM to pid 7 on h")
    fit._show_events()
    fit._show_events()
    notice = events.Notice(text="SIGTERM to pid 7 on h: the run stops after this step")
    coordinator.publish.remote.assert_called_once_with(notice)


@pytest.mark.parametrize("late", [False, True])
def test_succeeding_coordinator_charges_losses_of_its_predecessor_once(tmp_path: Path, late: bool) -> None:
    RunDirectory(LocalStore(tmp_path)).record(events.RunStarted(launcher="ray"))
    play(tmp_path, partial(lose_two, late=late), silence_s=LONG_S)
    LocalStore(tmp_path).delete("owner.json")  # the claim of the first

    async def second(worlds: Worlds) -> None:
        budgets = worlds.subject._budgets
        assert budgets.spend("worker", 0, attempt=2) is None
        exceeded = "3 failures (worker) and no step beyond 0; recovery allows 2 in a row"
        assert budgets.spend("worker", 0, attempt=3) == exceeded

    play(tmp_path, second, silence_s=LONG_S, max_failures=2)


@pytest.mark.usefixtures("watched")
def test_silence_counts_from_the_first_world_on_and_is_measured_on_one_address_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")

    async def story(worlds: Worlds) -> None:
        port = await worlds.subject.heartbeat_port()
        listening = [socket.getsockname() for socket in worlds.subject.heartbeats._server.sockets]
        assert listening == [("127.0.0.1", port)]
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in "abc"]
        for name, (reader, writer) in zip("abc", connections, strict=True):
            secret = await worlds.subject.admit(name)
            writer.write(f"{name} {_proof(secret, (await reader.readline()).decode().strip(), name)}\n".encode())
        await asyncio.sleep(4 * SHORT_S)  # they import and build
        assert not worlds.subject._dead
        await worlds.form()
        await until(lambda: len(worlds.told()) >= 3)
        for _, writer in connections:
            writer.close()
            await writer.wait_closed()
        worlds.subject.heartbeats._server.close()
        worlds.subject.heartbeats._watching.cancel()

    worlds = play(tmp_path, story)
    lost = {failure.member: failure.error for failure in worlds.directory.events(events.Failure)}
    assert lost.keys() == set("abc")
    assert all(error.startswith("not heard of for 0.") for error in lost.values())


def test_refused_attempt_is_tried_again_and_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.orchestration.coordinator._STORAGE_S", 0.01)
    honest, refused = Ownership.next_attempt, [OSError("the disk is gone")] * 5

    def next_attempt(ownership: Ownership, world: tuple[str, ...]) -> int:
        if refused:
            raise refused.pop()
        return honest(ownership, world)

    monkeypatch.setattr(Ownership, "next_attempt", next_attempt)

    async def story(worlds: Worlds) -> None:
        await asyncio.wait_for(worlds.form(), LONG_S / 2)
        assert worlds.attempt == 1

    worlds = play(tmp_path, story)
    assert [notice.text for notice in worlds.directory.events(events.Notice)] == [
        "no world can form until storage can be written: the disk is gone"
    ]


def test_each_decision_of_the_supervisor_is_carried_out(tmp_path: Path) -> None:
    async def story(worlds: Worlds) -> None:
        await worlds.form()
        subject = worlds.subject
        subject._carry_out([Record(events.Notice(event="silent", text="no heartbeat")), Dump(1)])
        assert subject.heartbeats.commands == Commands(dump=1)
        subject._carry_out([Release(("c",))])
        assert subject.heartbeats.commands == Commands(dump=1, leave=1)
        subject._carry_out([Abort()])
        assert subject.heartbeats.commands == Commands(dump=1, leave=1, aborted=1)
        assert set(subject.membership.world) == set("abc")
        subject._carry_out([Lose("b", "hung in forward for 61.0 s", FailureKind.HANG)])
        assert set(subject.membership.world) == set("ac")

    worlds = play(tmp_path, story)
    assert worlds.told() == [("hang", "b", False)]
    assert len(notices(worlds.directory.all_events(), "silent")) == 1


def test_a_silent_worker_is_reported_with_its_attempt(tmp_path: Path) -> None:
    async def story(worlds: Worlds) -> None:
        await worlds.form()
        for seconds in (SHORT_S / 2, SHORT_S / 2):
            silence = Silence(seconds, answers=True, nobody_heard=False, stretch=1.0)
            assert worlds.subject._patience("a", silence) == SHORT_S

    (silent,) = notices(play(tmp_path, story).directory.all_events(), "silent")
    assert (silent["attempt"], silent["member"]) == (1, "a")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S / 2):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watching(worlds: Worlds) -> AsyncIterator[None]:
    """Have the coordinator look for what no call reports."""
    task = asyncio.ensure_future(worlds.subject._watch())
    yield
    task.cancel()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.orchestration.coordinator.draining_nodes", dict)
    monkeypatch.setattr("steadfast.orchestration.coordinator._INTERVAL_S", 0.01)


@pytest.mark.usefixtures("watched")
def test_a_worker_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    async def report(worlds: Worlds, seconds: float) -> None:
        for rank, name in enumerate(worlds.subject.membership.world):
            phase, place = ("forward", 1) if name == "b" else ("gradients", 4)
            report = {"attempt": 1, "rank": rank, "position": [8, 0, place, 1, 0], "step": 8, "phase": phase}
            times = {"seconds": seconds, "limit_s": 3.0, "spent_s": {}}
            worlds.subject._heard(name, {"progress": {**report, **times}})
        await asyncio.sleep(0.05)

    async def story(worlds: Worlds) -> None:
        await worlds.form()
        async with watching(worlds):
            await report(worlds, 1.0)
            while "b" in worlds.subject.members:
                await report(worlds, 100.0)
        assert worlds.subject.heartbeats.commands == Commands(aborted=1)

    worlds = play(tmp_path, story)
    (hang,) = worlds.directory.events(events.Hang)
    assert (hang.phase, hang.guess, hang.stacks) == ("forward", "stuck", str(tmp_path / "stacks"))
    assert worlds.told() == [("hang", "b", False)]


def test_coordinator_releases_the_workers_of_a_draining_node_and_admits_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadfast.orchestration.coordinator.draining_nodes", lambda: {"b": 1.8e9})

    async def story(worlds: Worlds) -> None:
        await worlds.form()
        await worlds.subject._check_drains()
        assert worlds.subject.heartbeats.commands == Commands(leave=1)
        joining = worlds.subject.join(Member("d", None, node="b"))
        assert await asyncio.wait_for(joining, LONG_S / 2) is Leave.RELEASED
        worlds.subject.lose("b", "connection closed")

    worlds = play(tmp_path, story)
    assert worlds.told() == [("preemption", "b", False)]
    assert [event.members for event in worlds.directory.events(events.Preemption)] == [("b",)]


@pytest.mark.usefixtures("watched")
def test_a_run_that_another_command_has_taken_over_is_given_up(tmp_path: Path) -> None:
    why = "another command has taken over: on elsewhere, pid 1"

    async def story(worlds: Worlds) -> None:
        worlds.subject._ownership.lost = why
        await asyncio.wait_for(worlds.subject._watch(), LONG_S / 2)

    (failure,) = play(tmp_path, story).directory.events(events.Failure)
    assert (failure.kind, failure.fatal, failure.error) == ("ours", True, why)


def test_the_coordinator_of_a_killed_command_writes_no_failure_into_the_next_commands_run(tmp_path: Path) -> None:
    async def story(worlds: Worlds) -> None:
        await worlds.form()
        store = worlds.directory.store
        owner = read_owner(store)
        assert owner is not None
        write_json(store, "owner.json", asdict(replace(owner, token="of the next command")))
        assert await worlds.subject._next_attempt(("a",)) is None
        (shown,) = [event for event in await worlds.subject.events(0, stop=False) if isinstance(event, events.Failure)]
        assert "another command has taken over" in shown.error

    assert play(tmp_path, story).directory.events(events.Failure) == []


@pytest.mark.usefixtures("watched")
def test_a_check_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = RunDirectory.pop_requests
    errors, asked = [ZeroDivisionError()], list[str]()

    def look(directory: RunDirectory) -> list[Request]:
        if errors:
            raise errors.pop()
        return honest(directory)

    monkeypatch.setattr(RunDirectory, "pop_requests", look)

    async def story(worlds: Worlds) -> None:
        asked.append(worlds.directory.request_scale(1, 1))
        async with watching(worlds):
            await until(lambda: worlds.subject.membership.largest == 1)

    worlds = play(tmp_path, story)
    assert [(event.after, event.request) for event in worlds.directory.events(events.Scale)] == [((1, 1), *asked)]
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.usefixtures("watched")
def test_worker_is_killed_on_request_and_no_death_is_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr("ray.kill", killed.append)

    async def request_kill(directory: RunDirectory, rank: int) -> None:
        request = directory.request_kill(rank)
        await until(lambda: not directory.waits(request))

    async def story(worlds: Worlds) -> None:
        async with watching(worlds):
            await request_kill(worlds.directory, 0)  # without a world there is no worker to kill
            members = [Member(name, f"actor of {name}", name) for name in "abc"]
            await asyncio.gather(*map(worlds.subject.join, members))
            await request_kill(worlds.directory, 7)
            await request_kill(worlds.directory, 1)
            await until(lambda: bool(killed))

    worlds = play(tmp_path, story)
    name = worlds.subject.membership.world[1]
    assert killed == [f"actor of {name}"]
    *refused, notice = worlds.directory.events(events.Notice)
    assert [each.text[:20] for each in refused] == ["rank 0 is not killed", "rank 7 is not killed"]
    assert notice.text == f"rank 1 (worker {name}) is killed, as a user has requested"
    assert worlds.told() == []


@pytest.mark.usefixtures("watched")
def test_run_ends_after_a_long_shortage_and_says_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.available_resources", lambda: {"CPU": 3.0})

    async def story(worlds: Worlds) -> None:
        worlds.subject.membership.rescale(2, 3)
        worlds.subject._wait_s = 0.05
        joining = asyncio.ensure_future(worlds.subject.join(Member("a", None, "a")))
        await asyncio.wait_for(worlds.subject._watch(), LONG_S / 2)
        assert await joining is Leave.RUN_ENDED

    (failure,) = play(tmp_path, story).directory.events(events.Failure)
    assert failure.error == (
        "waited 0.05 s for workers: 1 of at least 2 (scaling.num_workers) have joined; 3 CPUs and 0 GPUs are free. "
        "Add nodes, and give the same command again"
    )


@pytest.mark.parametrize(
    ("module", "not_imported"),
    [("steadfast.orchestration.coordinator", "torch"), ("steadfast.worker", "torch.distributed.tensor")],
)
def test_a_process_starts_without_libraries_that_it_may_not_need(module: str, not_imported: str) -> None:
    code = f"import sys, {module}; sys.exit({not_imported!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class Answers:
    """The answers that reach workers by their heartbeat connections."""

    def __init__(self, worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[tuple[str, bytes]] = []
        monkeypatch.setattr(worlds.subject.heartbeats, "answer", lambda *told: self.lines.append(told))

    async def take(self, count: int) -> dict[str, WorldAssignment | Leave]:
        """Wait for answers to as many workers, and forget them."""
        await until(lambda: len(self.lines) >= count)
        told, self.lines = self.lines, []
        return {name: self._read(json.loads(line)["answer"]) for name, line in told}

    def _read(self, answer: Any) -> WorldAssignment | Leave:
        return Leave(answer) if isinstance(answer, str) else WorldAssignment.of_line(answer)


def newcomer(name: str) -> Member:
    return Member(name, None, name, store=(f"host of {name}", 1))


def test_worker_that_waits_occupies_no_call_and_is_told_its_one_place_however_often_it_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDirectory(LocalStore(tmp_path)).record(events.ShortStep(step=13, position=165))

    async def story(worlds: Worlds) -> None:
        answers = Answers(worlds, monkeypatch)
        # Ray repeats a call, and so does a worker that comes to another coordinator. Each call returns before there is
        # a world.
        for name in "aabbcc":
            await worlds.subject.ask(newcomer(name), 0)
        first = await answers.take(3)
        world, amendments = worlds.subject.membership.world, worlds.directory.amendments()
        assert amendments.ends == (End(13, 165),)
        store = (f"host of {world[0]}", 1)
        assert first == {name: WorldAssignment(rank, 3, 1, store, amendments) for rank, name in enumerate(world)}
        await worlds.subject.ask(newcomer("b"), 0)
        assert await answers.take(1) == {"b": first["b"]}
        assert worlds.subject.membership._waiting == {}  # it still trains
        for name in "abc":
            await worlds.subject.ask(newcomer(name), 1)
        assert [getattr(place, "attempt", None) for place in (await answers.take(3)).values()] == [2] * 3

    play(tmp_path, story)


@pytest.mark.parametrize("fails", [False, True])
def test_no_worker_waits_for_a_coordinator_that_gives_up_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async def story(worlds: Worlds) -> None:
        answers = Answers(worlds, monkeypatch)
        await worlds.subject.ask(newcomer("a"), 0)
        await asyncio.sleep(0.05)
        if fails:
            fault = Mock(side_effect=ZeroDivisionError("a fault"))
            monkeypatch.setattr(worlds.subject.membership, "join", fault)
        else:
            worlds.subject.give_up("no more")
        await worlds.subject.ask(newcomer("b"), 0)
        assert await answers.take(2) == {"a": Leave.RUN_ENDED, "b": Leave.RUN_ENDED}

    (failure,) = play(tmp_path, story).directory.events(events.Failure)
    assert failure.fatal
    assert ("ZeroDivisionError: a fault" if fails else "no more") in failure.error
