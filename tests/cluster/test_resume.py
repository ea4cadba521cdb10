"""Giving the same command again, in every state that a run can be left in, on a disk and in a bucket."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore, open_store
from tests.support.checks import check_finished, check_identical, check_ledger, summary_of
from tests.support.command import Commands, descendants
from tests.support.events import event_lines
from tests.support.history import read_ledger
from tests.support.leftovers import wait_until_gone
from tests.support.s3 import Proxy

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

STEPS = 150
OVERRIDES = [f"run.steps={STEPS}", "checkpoint.every=25 steps"]
SLOW = "faults.inject=[{kind: slow_at, ranks: [0, 1], ms: 20}]"  # so that another command finds it running


def test_the_same_command_again(on_head: Commands) -> None:
    run = on_head("run")

    running = run.start(*OVERRIDES, SLOW)
    running.wait_for_step(30)
    second = run.run(*OVERRIDES)
    assert second.code == 2
    assert f"already running: attempt 1 on {os.uname().nodename}, pid {running.process.pid}" in second.output

    running.interrupt()
    stopped = running.wait(30)
    assert stopped.code == 3, stopped.output
    reached = summary_of(run.directory)
    assert reached["status"] == "stopped"
    assert reached["last_checkpoint"].endswith(f"step-{reached['step']:08d}")

    reseeded = run.run(*OVERRIDES, "run.seed=2")
    assert reseeded.code == 2
    assert "run.seed: 1 -> 2" in reseeded.output

    resumed = run.start(*OVERRIDES, "logging.every_steps=20")
    restored = resumed.wait_for_event("restore")
    assert (restored["step"], restored["source"], restored["lost_steps"]) == (reached["step"], "checkpoint", 0)
    resumed.wait_for_step(reached["step"] + 40)
    resumed.process.kill()
    assert "changed logging.every_steps: 10 -> 20" in resumed.wait().output

    check_finished(run.start(*OVERRIDES))
    check_ledger(run.directory, STEPS)
    assert summary_of(run.directory)["lost_steps"] <= 25

    began = time.monotonic()
    again = run.run(*OVERRIDES)
    assert again.code == 0
    assert f"has finished: {STEPS} steps" in again.output
    assert f"run.steps={2 * STEPS}" in again.output
    assert time.monotonic() - began < 20, "a finished run needs no Ray to say so"

    assert on_head("undisturbed").run(*OVERRIDES).code == 0
    check_identical(run.directory, on_head("undisturbed").directory)


def test_ctrl_c_before_the_first_step_stops_and_leaves_nothing(command: Commands) -> None:
    run = command()
    running = run.start(*OVERRIDES)
    running.wait_until(lambda: "Ray: embedded" in running.output_path.read_text(), "Ray")
    left = [pid for pid, _ in descendants(running.process.pid)]
    running.interrupt()
    assert running.process.wait(30) == 3
    wait_until_gone(left, 20)
    assert not run.directory.exists()


def test_ctrl_c_twice_stops_at_once_and_leaves_no_process(command: Commands) -> None:
    running = command().start(*OVERRIDES, "task.target=tests.examples.slow:Slow")
    running.wait_for_step(1)
    left = [pid for pid, _ in descendants(running.process.pid)]
    running.interrupt()
    running.wait_until(lambda: "stopping after this step" in running.output_path.read_text(), "the first Ctrl-C")
    time.sleep(0.6)  # sooner, and it would count as the same one
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(5) == 3
    wait_until_gone(left, 20)


def test_resume_must_refuses_an_empty_directory_and_never_a_full_one(on_head: Commands) -> None:
    refused = on_head("empty").run("run.resume=must")
    assert refused.code == 2
    assert "holds no checkpoint" in refused.output
    full = on_head("full")
    assert full.run("run.steps=5").code == 0
    refused = full.run("run.steps=5", "run.resume=never")
    assert refused.code == 2
    assert "holds checkpoints" in refused.output


def test_a_run_in_a_bucket_survives_a_worker_and_is_stopped_and_resumed(
    on_head: Commands, proxy: Proxy, tmp_path: Path
) -> None:
    directory = RunDirectory(open_store(proxy.uri("runs/run")))
    words = [f"run.storage={proxy.uri('runs')}", "checkpoint.every=100 steps"]

    running = on_head().start(*words, "run.steps=1000000")
    running.wait_until(lambda: read_ledger(directory.store).last_step >= 60, "step 60 in the bucket")
    os.kill(running.worker_pids()[0], signal.SIGKILL)
    running.wait_until(lambda: bool(told(directory, "restore")), "the survivor's state")
    running.interrupt()
    stopped = running.wait(60)
    assert stopped.code == 3, stopped.output
    summary = directory.summary()
    assert summary is not None
    reached = summary["step"]

    steps = reached + 50
    check_finished(on_head().start(*words, f"run.steps={steps}"))
    restored = told(directory, "restore")[-1]
    assert (restored["step"], restored["source"], restored["lost_steps"]) == (reached, "checkpoint", 0)
    assert not (tmp_path / "run").exists()
    for name in ("config.yaml", "steps.jsonl", "summary.json"):
        copy(directory, tmp_path / "copy", name)
    check_ledger(tmp_path / "copy", steps)
    assert directory.store.list("tensorboard")


def told(directory: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [event for event in event_lines(directory) if event["event"] == name]


def copy(directory: RunDirectory, folder: Path, name: str) -> None:
    parts = directory.store.list(name)
    data = b"".join(directory.store.read(f"{name}/{part}") for part in parts) or directory.store.read(name)
    LocalStore(folder).write(name, [data])
