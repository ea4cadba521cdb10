"""Giving the same command again, in every state that a run can be left in."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.checks import check_identical, check_ledger, summary_of
from tests.support.command import Commands, descendants, is_alive

pytestmark = pytest.mark.ray

STEPS = 500
OVERRIDES = [f"run.steps={STEPS}", "checkpoint.every=50 steps"]
SLOW = "faults.inject=[{kind: slow_at, ranks: [0, 1], ms: 20}]"  # so that another command finds it running


@pytest.mark.timeout(300)
def test_the_same_command_again(on_head: Commands) -> None:
    run = on_head("run")

    running = run.start(*OVERRIDES, SLOW)
    running.wait_for_step(60)
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
    resumed.wait_for_step(reached["step"] + 80)
    resumed.process.kill()
    assert "changed logging.every_steps: 10 -> 20" in resumed.wait().output

    last = run.start(*OVERRIDES)
    finished = last.wait()
    assert finished.code == 0, finished.output
    check_ledger(run.directory, STEPS)
    assert summary_of(run.directory)["lost_steps"] <= 50

    began = time.monotonic()
    again = run.run(*OVERRIDES)
    assert again.code == 0
    assert f"has finished: {STEPS} steps" in again.output
    assert f"run.steps={2 * STEPS}" in again.output
    assert time.monotonic() - began < 20, "a finished run needs no Ray to say so"

    assert on_head("undisturbed").run(*OVERRIDES).code == 0
    check_identical(run.directory, on_head("undisturbed").directory)


@pytest.mark.slow  # under torchrun it is proved as well
@pytest.mark.timeout(240)
def test_a_run_that_is_extended_uses_each_sample_once(on_head: Commands) -> None:
    """Of 1438 samples in steps of 64: an epoch ends with a step of 30, and the next one begins behind it."""
    run = on_head("run", config="digits.yaml")
    for epochs in (1, 2):
        finished = run.run(f"run.epochs={epochs}", "run.report=false", small=False)
        assert finished.code == 0, finished.output
    assert (
        "step 23 keeps fewer samples than batch.global_size, because the run had ended with this step; "
        "the next step begins at position 1438 of the training samples" in finished.output
    )
    committed = check_ledger(run.directory, 46).committed
    assert [step for step, line in committed.items() if line["num_samples"] < 64] == [23, 46]
    assert summary_of(run.directory)["samples"] == 2 * 1438


def test_ctrl_c_before_the_first_step_stops_and_leaves_nothing(command: Commands) -> None:
    run = command()
    running = run.start(*OVERRIDES)
    running.wait_until(lambda: "Ray: embedded" in running.output_path.read_text(), "Ray")
    left = [pid for pid, _ in descendants(running.process.pid)]
    running.interrupt()
    assert running.process.wait(30) == 3
    await_end_of(left)
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
    await_end_of(left)


def await_end_of(pids: list[int]) -> None:
    limit = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < limit, "processes are left"
        time.sleep(0.05)


def test_resume_must_refuses_an_empty_directory_and_never_a_full_one(on_head: Commands) -> None:
    refused = on_head("empty").run("run.resume=must")
    assert refused.code == 2
    assert "holds no checkpoint" in refused.output
    full = on_head("full")
    assert full.run("run.steps=5").code == 0
    refused = full.run("run.steps=5", "run.resume=never")
    assert refused.code == 2
    assert "holds checkpoints" in refused.output
