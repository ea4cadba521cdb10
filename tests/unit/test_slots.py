"""Slots without Ray: how many are open at a time, and which nodes they avoid."""

import asyncio
import pickle
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import Queue
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import (
    ActorUnschedulableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.train import CheckpointConfig, Result
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.context import StorageContext
from ray.train.v2._internal.execution.controller import controller
from ray.train.v2._internal.execution.controller.controller import TrainController
from ray.train.v2._internal.execution.worker_group.worker import WorkerStatus

from steadfast.guards.failures import FailureKind
from steadfast.orchestration import worker_runtime
from steadfast.orchestration.internals import slots, starting
from steadfast.orchestration.internals.slots import (
    _MOST_PENDING,
    LastCommit,
    SlotController,
    SlotWorkerGroup,
    _Slot,
    report,
)
from steadfast.orchestration.messages import FailureReport, Member
from steadfast.orchestration.policies import Quarantine
from steadfast.orchestration.trainer import SlotTrainer

LOST = FailureReport(FailureKind.WORKER, 0, 0, "its process has ended", "")


class Group(SlotWorkerGroup):
    """Slots whose keepers do nothing, with workers on these nodes."""

    def __init__(self, *nodes: str, quarantine: Quarantine | None = None) -> None:
        self._quarantine = quarantine or Quarantine()
        self._coordinator = Mock()
        self._worker_group_context = Mock(resources_per_worker={"CPU": 1})
        self._slots = []
        for index, node in enumerate(nodes):
            self._slots.append(_Slot(index, worker=SimpleNamespace(metadata=SimpleNamespace(node_id=node))))

    def _keep(self, slot: Any) -> None:
        slot.closed.wait(20)


@pytest.mark.parametrize("count", [3, 10**26])
def test_only_some_slots_wait_for_room_at_a_time_whatever_is_asked_for(count: int) -> None:
    group = Group()
    threads = threading.active_count()
    for expected in (_MOST_PENDING, 2 * _MOST_PENDING, 4 * _MOST_PENDING):
        group._open(count)
        group._open(count)
        assert len(group._slots) == min(count, expected)
        for slot in group._slots:
            slot.worker = object()
    assert threading.active_count() - threads == min(count, 4 * _MOST_PENDING)
    for slot in group._slots:
        slot.closed.set()


@pytest.mark.parametrize(
    ("kind", "computed_wrongly", "others", "avoided"),
    [
        ("worker", True, ["good"], ["bad"]),
        ("worker", False, ["good"], []),
        ("worker", True, ["bad"], []),
        ("device", False, ["good"], ["bad"]),
        ("device", False, [], ["bad"]),
    ],
)
def test_a_node_with_a_fault_gets_no_other_worker(
    kind: str, computed_wrongly: bool, others: list[str], avoided: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(*others)
    monkeypatch.setattr(slots, "_OTHERS_S", 0.0)
    monkeypatch.setattr("ray.get", lambda answer, timeout: computed_wrongly)
    group._record_death(Member("", None, "bad"), replace(LOST, kind=FailureKind(kind)), lived_s=1000.0)
    assert group._coordinator.ended.remote.call_args.args[2:] == ({"CPU"}, not others)
    assert group._quarantine.avoided(time.monotonic()) == avoided
    assert [call.args[0].node for call in group._coordinator.publish.remote.call_args_list] == avoided


def test_a_worker_of_another_gpu_may_start_after_one_that_cannot_use_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    late = SimpleNamespace(metadata=SimpleNamespace(node_id="bad"))
    pauses: list[float] = []
    monkeypatch.setattr(
        "time.sleep", lambda pause_s: pauses.append(pause_s) or group._slots.append(_Slot(0, worker=late))
    )
    monkeypatch.setattr("ray.get", lambda answer, timeout: False)
    group._record_death(Member("", None, "bad"), replace(LOST, kind=FailureKind.DEVICE), lived_s=1.0)
    assert group._coordinator.ended.remote.call_args.args[3] is False, "Ray has started another worker"


def test_a_coordinator_that_is_away_leaves_a_death_to_be_judged_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group("good", quarantine=Quarantine(failures=1))
    monkeypatch.setattr("ray.get", Mock(side_effect=GetTimeoutError))
    group._record_death(Member("", None, "bad"), LOST, lived_s=1.0)
    assert group._quarantine.avoided(time.monotonic()) == ["bad"]


def test_rays_register_names_the_last_commit_of_a_run_that_retires_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty commits with keep_last=2; the controller reads every third report."""
    run = tmp_path / "run"
    run.mkdir()
    queue: Queue[Any] = Queue(1)
    monkeypatch.setattr(slots, "get_train_context", lambda: SimpleNamespace(get_result_queue=lambda: queue))

    async def train() -> None:
        register = LastCommit(CheckpointConfig(), StorageContext(str(tmp_path), "run"))
        for step in range(1, 21):
            (run / f"step-{step}").mkdir()
            report(str(run / f"step-{step}"), {"step": step})
            if step > 2:
                (run / f"step-{step - 2}").rmdir()
            if step % 3 == 2:
                register.after_report(queue.get_nowait(), [])
            await asyncio.sleep(0)  # for what the register has begun

    asyncio.run(train())
    result = Result.from_path(run)
    assert result.checkpoint.path == str(run / "step-20")
    assert result.metrics == {"step": 20}


def test_controller_of_slots_uses_that_register(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "CheckpointManager", CheckpointManager)  # put back after the test
    made = Mock()
    monkeypatch.setattr(TrainController, "__init__", lambda self: made(controller.CheckpointManager))
    SlotController()
    made.assert_called_once_with(LastCommit)


def test_trainer_of_slots_keeps_no_object_in_rays_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's client would end the command when the store is gone, see `InlineFunction`."""
    given: list[Any] = []
    monkeypatch.setattr(TorchTrainer, "_initialize_and_run_controller", lambda self, **named: given.append(named))
    stored = SimpleNamespace(_ref="of the store", get=lambda: abs)
    trainer = SlotTrainer.__new__(SlotTrainer)
    trainer._initialize_and_run_controller(train_fn_ref=stored, callbacks=[])
    (named,) = given
    assert pickle.loads(pickle.dumps(named["train_fn_ref"])).get() is abs
    assert stored._ref is None
    assert named["callbacks"] == []


KILLED, ENDED = "#!/bin/sh\nkill -9 $$", "#!/bin/sh\nexit 3"
DIED = "The actor died unexpectedly before finishing this task.\n\tpid: 7\nWorker exit detail: End of file."
CREATION = (
    "The actor died because of an error raised in its creation task, \x1b[36mray::S.__init__()\x1b[39m\nImportError: no"
)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RayActorError("", DIED), "worker", "its process has ended: it was killed, perhaps because memory ran out"),
        (RayActorError("", CREATION), "exception", "ImportError: no"),
        (
            RayTaskError("f", "Traceback\nAttributeError: persistent_load", ValueError()),
            "exception",
            "AttributeError: pers",
        ),
        (
            OutOfMemoryError("Task was killed due to the node running low on memory.\nMore"),
            "oom",
            "Task was killed due",
        ),
        (
            starting.NotStarted("its program cannot run: python: No such file", was_killed=False),
            "ours",
            "its program cannot run: python",
        ),
        (starting.NotStarted("python was killed", was_killed=True), "worker", "python was killed"),
        (ActorUnschedulableError("worker startup repeatedly failed"), "worker", "The actor is not schedulable: worker"),
    ],
)
def test_slot_names_the_cause_of_a_worker_that_ray_could_not_start(error: RayError, kind: str, message: str) -> None:
    report = starting.failure_to_start(error)
    assert report.kind == kind
    assert report.message.startswith(message)
    assert "\x1b" not in report.traceback


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            "bash: line 1: /opt/python: No such file or directory\n[2026 E] (raylet) not registered",
            "bash: line 1: /opt/",
        ),
        ("Traceback\nModuleNotFoundError: No module named 'ray'", "ModuleNotFoundError: No module named 'ray'"),
        ("Installed 12 packages in 3 s", ""),
        ("[2026 E] (raylet) an error of its own", ""),
        (KILLED, "python was killed by signal 9, perhaps because memory ran out"),
        (ENDED, "python has ended with exit code 3"),
        ("#!/no/python", "python: No such file or directory"),
    ],
)
def test_slot_finds_what_a_program_that_cannot_run_has_written(
    lines: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raylet.1.err").write_text(lines)
    python = sys.executable
    if lines.startswith("#!"):  # a Python of its own, which ends without a word
        python, words, lines = str(tmp_path / "python"), lines, ""
        Path(python).write_text(words)
        Path(python).chmod(0o755)
    command = f"--python_worker_command={python} worker.py"
    raylet = [sys.executable, "-c", "input()", "--node_id=of the actor", command]
    monkeypatch.setattr(starting, "node_of", lambda actor: "of the actor")
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("ray.wait", Mock(side_effect=[([], ["pending"]), (["there"], [])]))
    monkeypatch.setattr("ray.get", lambda answer: "metadata")
    with (tmp_path / "raylet.1.err").open("a") as errors, Popen(raylet, stdin=PIPE, stderr=errors) as process:
        if cause:
            with pytest.raises(starting.NotStarted, match=re.escape(cause)):
                starting.await_start(Mock())
        else:
            assert starting.await_start(Mock()) == "metadata"
        process.kill()


def test_worker_without_a_usable_gpu_returns_its_failure_instead_of_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Mock(get_accelerator_ids=lambda: {"GPU": ["0"]})
    monkeypatch.setattr("ray.get_runtime_context", lambda: here)
    monkeypatch.setattr("torch.cuda.init", Mock(side_effect=RuntimeError("Found no NVIDIA driver on your system.")))
    report = worker_runtime.train_loop(Mock())
    assert isinstance(report, FailureReport)
    assert report.kind is FailureKind.DEVICE
    assert "Found no NVIDIA driver on your system. Look at" in report.message
    monkeypatch.setattr(worker_runtime, "RayRuntime", Mock(side_effect=ValueError("of no kind")))
    report = worker_runtime.train_loop(Mock())
    assert isinstance(report, FailureReport)
    assert (report.kind, report.message) == (FailureKind.EXCEPTION, "ValueError: of no kind")


def test_slot_reports_the_failure_that_its_worker_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group("a", "b")
    group._over = False
    statuses: dict[str, WorkerStatus] = {}
    for slot, returned in zip(group._slots, (LOST, None), strict=True):
        slot.poll = f"poll of {slot.index}"
        slot.actor = f"actor of {slot.index}"
        statuses[slot.poll] = WorkerStatus(running=returned is None, return_value=returned)
    killed: list[Any] = []
    monkeypatch.setattr("ray.wait", lambda asked, **_: (asked, []))
    monkeypatch.setattr("ray.get", statuses.__getitem__)
    monkeypatch.setattr("ray.kill", killed.append)
    monkeypatch.setattr(group, "_follow_target", lambda: None)
    monkeypatch.setattr(SlotWorkerGroup, "__len__", lambda self: 2)
    first, _ = group._poll_workers_and_collect_errors(1.0)
    assert first.running
    assert first.return_value is None
    assert [slot.failure for slot in group._slots] == [LOST, None]
    assert killed == ["actor of 0"]
