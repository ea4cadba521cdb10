"""Processes of a run that do not train are killed: the command goes on by itself, and says so."""

import os
import signal
from typing import Any
from unittest.mock import Mock

import pytest

from steadfast.orchestration import trainer
from tests.support.checks import check_stopped
from tests.support.command import FOR_EVER, Commands, Running, descendants
from tests.support.leftovers import SHARED_MEMORY, wait_until_memory_is_free, wait_until_ray_is_gone

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def kill(running: Running, title: str) -> int:
    """Kill the only process of this command whose title begins so. Return the last step before."""
    (pid,) = running.worker_pids(title)
    last = running.history.last_step
    os.kill(pid, signal.SIGKILL)
    return last


def test_the_coordinator_is_killed_and_the_world_trains_on(on_head: Commands) -> None:
    words = ("parallel.kind=fsdp", "checkpoint.every=20 steps", "scaling.num_workers=[1,2]")
    running = on_head().start(FOR_EVER, *words)
    running.wait_for_event("attempt_started", attempt=1, world_size=2)
    running.wait_for_step(20)
    workers = running.worker_pids()
    last = kill(running, "ray::Coordinator")
    running.wait_for_step(last + 20)
    told = running.wait_for_event("process_restarted")
    assert told["follows"] == "another one has taken its place, and 2 of 2 workers go on"
    known = running.history.last_step
    running.wait_for_step(known + 20)
    assert running.worker_pids() == workers
    assert [event["attempt"] for event in running.events if event["event"] == "attempt_started"] == [1]
    running.wait_until(
        lambda: any(event["event"] == "checkpoint" and event["step"] > known for event in running.events),
        "a checkpoint of the same world",
    )

    os.kill(workers[0], signal.SIGKILL)
    restored = running.wait_for_event("restore", attempt=2)
    running.wait_for_step(known + 40)
    running.wait_until(lambda: running.history.lines[-1]["step"] > known + 40, "the steps that were lost")
    check_stopped(running, lost_steps=restored["lost_steps"] + 20)
    assert "the coordinator has died: another one has taken its place" in running.output_path.read_text()


def test_the_controller_is_killed_and_the_command_starts_another_one(on_head: Commands) -> None:
    running = on_head().start(FOR_EVER, "checkpoint.every=10 steps", "scaling.num_workers=[1,2]")
    running.wait_for_event("checkpoint", timeout_s=150)
    kill(running, "ray::SlotController")
    restored = running.wait_for_event("restore")
    assert restored["source"] in ("snapshot", "checkpoint")  # whichever is newer
    running.wait_until(lambda: running.history.lines[-1]["step"] > restored["step"] + restored["lost_steps"], "news")
    assert [event["process"] for event in running.events if event["event"] == "process_restarted"] == [
        "Ray's controller"
    ]
    check_stopped(running, lost_steps=restored["lost_steps"])
    said = running.output_path.read_text()
    assert "Ray's controller has died: another one starts, and workers with it" in said
    assert "class_name" not in said


@pytest.mark.parametrize("saving_until_s", [None, 1e12])
def test_the_command_comes_back_where_the_workers_have_saved_and_ended_before_their_summary_came(
    monkeypatch: pytest.MonkeyPatch, saving_until_s: float | None
) -> None:
    monkeypatch.setattr(trainer, "dead_processes", lambda: {"gcs_server"})
    mock: Any = Mock()
    fit = trainer.Fit(mock, mock, mock, mock, mock, 1, 1, "", False, _saving_until_s=saving_until_s)
    with pytest.raises(trainer.RayDied):
        fit._check_ray(ended=True)


@pytest.mark.alone
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("title", "what"),
    [
        ("gcs_server", "Ray's GCS"),
        pytest.param("/raylet/raylet", "Ray's raylet", marks=pytest.mark.slow),
        pytest.param("ray::RuntimeEnvAgent", "Ray's raylet", marks=pytest.mark.slow),  # which follows its agent
    ],
)
def test_a_part_of_an_embedded_ray_is_killed_and_the_command_starts_again(
    command: Commands, title: str, what: str
) -> None:
    before = set(SHARED_MEMORY.iterdir())
    running = command().start(FOR_EVER, "checkpoint.every=10 steps", "scaling.num_workers=2")
    running.wait_for_event("checkpoint", timeout_s=150)
    assert running.scale("1:2").returncode == 0
    of_the_first_ray = descendants(running.process.pid)
    kill(running, title)
    restored = running.wait_for_event("restore", timeout_s=150)
    assert restored["source"] in ("snapshot", "checkpoint")  # whichever is newer
    if title == "gcs_server":  # whose death leaves the workers the time to save what they hold
        assert restored["lost_steps"] == 0
    running.wait_until(lambda: running.history.lines[-1]["step"] > restored["step"] + restored["lost_steps"], "news")
    wait_until_ray_is_gone(of_the_first_ray, 60, agents_too=title != "gcs_server")
    check_stopped(running, lost_steps=restored["lost_steps"])
    assert f"{what} has died: the command starts again from the newest state" in running.output_path.read_text()
    wait_until_memory_is_free(before)
