"""What a worker does before it trains."""

import os
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray.train
import torch
import torch.distributed as dist

from steadfast import worker
from steadfast.config import Config
from steadfast.errors import UsageError, UserExit
from steadfast.guards.corruption import Corrupted
from steadfast.orchestration import trainer, worker_runtime
from steadfast.orchestration.cluster import WARNINGS_REMEDY
from steadfast.orchestration.heartbeat import Commands
from steadfast.orchestration.messages import Leave, Member, WorldAssignment
from steadfast.orchestration.objects import Objects
from steadfast.plan import Amendments
from steadfast.world.timeouts import Timeouts


class Runtime:
    """Stands for a worker's connection to the coordinator."""

    device = None
    leave_reason = Leave.RELEASED
    failure = None
    told: list[BaseException]

    def __init__(self, spec: Any) -> None:
        Runtime.told = []

    def failed(self, step: int, error: BaseException) -> bool:
        self.told.append(error)
        if isinstance(error, UsageError):  # which ends the run
            raise error
        return True

    def show_output(self, lines: list[str]) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    trained: list[str] = []
    monkeypatch.setattr(worker_runtime, "RayRuntime", Runtime)
    monkeypatch.chdir(os.getcwd())  # put back after the test: the loop goes elsewhere
    monkeypatch.setattr("steadfast.worker.work", lambda *_: trained.append(os.getcwd()))
    return trained


def spec(folder: Path, check: Any = lambda: None) -> Any:
    directory = SimpleNamespace(check_shared=check)
    return SimpleNamespace(config=Config(), folder=folder, directory=directory, objects=Objects(b""))


def test_a_working_directory_that_a_dying_node_has_deleted_is_not_asked_for(
    trained: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    worker_runtime.train_loop(spec(tmp_path))
    assert trained == [str(tmp_path)]
    assert Runtime.told == []


def test_what_a_worker_raises_before_it_trains_is_told_and_ends_it_alone(trained: list[str], tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError("the disk is gone")

    worker_runtime.train_loop(spec(tmp_path, refuse))
    assert [str(error) for error in Runtime.told] == ["the disk is gone"]
    assert trained == []


def test_the_error_of_a_worker_group_is_told_by_what_its_worker_has_raised() -> None:
    failure = RuntimeError("Traceback (most recent call last):\n  File x\nFileNotFoundError: [Errno 2] No such file")
    line = trainer._in_short(ray.train.WorkerGroupError("Training failed due to worker errors:", {0: failure}))
    assert line.startswith("WorkerGroupError: FileNotFoundError: [Errno 2] No such file. Give the same command again")
    assert trainer._in_short(ValueError("one.\ntwo")).startswith("ValueError: one. Give the same command")
    said = trainer._in_short(UserWarning("old"))
    assert said == f"UserWarning: old. {WARNINGS_REMEDY}"


def ray_runtime(**fields: Any) -> worker_runtime.RayRuntime:
    """Return a worker's runtime with these fields alone."""
    runtime = worker_runtime.RayRuntime.__new__(worker_runtime.RayRuntime)
    vars(runtime).update(fields)
    return runtime


@pytest.mark.parametrize(("rank", "leaves"), [(0, False), (1, True), (2, False)])
def test_all_ranks_report_the_member_that_computes_wrongly_and_it_alone_leaves(
    rank: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.get", lambda answer: answer)
    coordinator = Mock(**{"failed.remote.return_value": False})  # the run goes on
    place = WorldAssignment(rank, 3, 4, ("", 0), Amendments())
    runtime = ray_runtime(_coordinator=coordinator, _attempt=4, _member=Member("abc"[rank], None, "node"), _place=place)
    runtime.leave_reason = Leave.RUN_ENDED
    runtime.failed(6, Corrupted(1, 0, "step 7: rank 1 (host n, cpu) computes wrongly: ..."))
    (call,) = coordinator.failed.remote.call_args_list
    member, report = call.args
    assert (member, report.kind, report.attempt, report.step) == ("abc"[rank], "corruption", 4, 6)
    assert (report.corrupted, report.message) == (1, "step 7: rank 1 (host n, cpu) computes wrongly: ...")
    assert (runtime.leave_reason is Leave.RELEASED) == leaves


@pytest.mark.parametrize("raised", [SystemExit("no more"), KeyboardInterrupt("no more")])
def test_data_or_a_model_that_would_end_the_process_are_told_as_an_exception(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    monkeypatch.setattr(worker, "set_numerics", Mock())
    monkeypatch.setattr(worker, "record_memory_history", Mock())
    monkeypatch.setattr(worker, "WorkerState", Mock(side_effect=raised))
    runtime = Runtime(None)
    assert worker.start_worker(Config(), runtime) is None  # type: ignore[arg-type]
    (told,) = Runtime.told
    assert isinstance(told, UserExit)
    assert str(told).endswith("in your own code (no more)")


@pytest.mark.parametrize("is_early", [False, True])
def test_the_command_to_abort_reaches_a_world_that_still_forms(monkeypatch: pytest.MonkeyPatch, is_early: bool) -> None:
    mocks = {"_progress": Mock(), "_member": Mock(), "_heartbeats": Mock(ended=False)}
    commands = Commands(aborted=4 if is_early else 3)
    runtime = ray_runtime(_timeouts=Timeouts(), _world=None, _attempt=4, _commands=commands, **mocks)
    runtime.device = torch.device("cpu")
    seen: list[bool] = []

    def form(*arguments: Any) -> None:
        aborted = arguments[-1]
        seen.append(aborted.is_set())
        runtime._obey(Commands(aborted=4))
        seen.append(aborted.is_set())

    monkeypatch.setattr(worker_runtime, "form_world", form)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(dist, "TCPStore", Mock())
        place = WorldAssignment(0, 2, 4, listener.getsockname(), Amendments())
        runtime._form(place)
    assert seen == [is_early, True]


WORLD = {"rank": 1, "size": 2, "attempt": 5, "store": ["host", 1], "amendments": Amendments().to_line()}


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> worker_runtime.RayRuntime:
    """A worker that had a place in attempt 4, and a coordinator that keeps what is asked."""
    monkeypatch.setattr("ray.get", lambda answer, timeout=None: answer)
    nothing = dict.fromkeys(("_place", "_world", "_store", "_asking"))
    mocks = {"_coordinator": Mock(), "_heartbeats": Mock(ended=False)}
    own = {"_member": Member("a", None, "node"), "_attempt": 4, "_host": "host", "_commands": Commands()}
    return ray_runtime(**nothing, **mocks, **own, _aborted=threading.Event(), _answers=SimpleQueue())


def test_a_worker_waits_for_the_answer_to_its_question_and_takes_no_other(asking: worker_runtime.RayRuntime) -> None:
    def answer(member: Member, attempt: int) -> None:
        assert (member.name, attempt) == ("a", 4)
        for former in (4, 3):
            asking._hear_answer({**WORLD, "attempt": former})  # repeated after a lost connection
        asking._hear_answer(WORLD)
        asking._hear_answer(WORLD)

    asking._hear_answer(WORLD)  # nothing was asked
    asking._coordinator.ask.remote = answer
    place = WorldAssignment(1, 2, 5, ("host", 1), Amendments())
    assert asking._ask(asking._member) == asking._place == place
    assert asking._answers.empty()


def test_a_worker_that_is_sent_away_or_has_no_coordinator_waits_no_longer(asking: worker_runtime.RayRuntime) -> None:
    for reason in Leave:
        asking._coordinator.ask.remote = lambda *_, said=reason: asking._hear_answer(said.value)
        assert asking._ask(asking._member) is reason
    asking._coordinator.ask.remote = lambda *_: asking._obey(None)
    assert asking._ask(asking._member) is Leave.RELEASED


def test_a_worker_asks_the_next_coordinator_again_until_it_has_its_answer(asking: worker_runtime.RayRuntime) -> None:
    asked: list[int] = []
    asking._coordinator.rejoin.remote.side_effect = [True, True, False, True]
    asking._coordinator.ask.remote = lambda _, attempt: asked.append(attempt)
    asking._find_again(1.0)
    assert asked == []
    asking._asking = asking._member, 4
    asking._find_again(1.0)
    assert asking._find_again(1.0) is None
    asking._hear_answer(WORLD)
    asking._find_again(1.0)
    assert asked == [4]
    assert asking._coordinator.rejoin.remote.call_args.args[1].attempt == 5
