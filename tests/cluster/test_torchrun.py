"""The same loop under plain torchrun, and the same result as under Ray."""

import time
from pathlib import Path

import psutil
import pytest

from steadfast.run.directory import RunDirectory
from steadfast.run.events import RunStarted
from steadfast.storage import LocalStore
from steadfast.telemetry.goodput import TimeLedger, read_totals
from steadfast.telemetry.interruptions import read_interruptions
from tests.support.checks import check_finished, check_ledger, summary_of
from tests.support.command import STANDALONE, TORCHRUN, Commands
from tests.support.curves import kill_rank
from tests.support.history import History

pytestmark = pytest.mark.timeout(240)

STEPS = 80
OVERRIDES = [f"run.steps={STEPS}", "checkpoint.every=20 steps"]


def test_max_restarts_resumes_a_killed_worker(command: Commands) -> None:
    run = command(launcher=[*STANDALONE, "--max-restarts", "2"])
    running = run.start(*OVERRIDES, "run.steps=200")
    running.wait_for_step(40)
    given_s = psutil.Process(running.process.pid).create_time()
    killed_s = time.time()
    kill_rank(running, 1)
    check_finished(running)
    history = check_ledger(run.directory, 200)
    assert history.num_lost <= 20
    assert summary_of(run.directory)["attempts"] == 2
    check_gap(RunDirectory(LocalStore(run.directory)), history, given_s, killed_s)


def check_gap(directory: RunDirectory, history: History, given_s: float, killed_s: float) -> None:
    """Each second from torchrun's start to the end is accounted for, and the gap is what it was: the same command's."""
    first, again = directory.events(RunStarted)
    assert (first.again, again.again) == (None, True)
    assert first.time_s == pytest.approx(given_s, abs=1.0)  # the kernel's clock of starts is that of a second
    ledger = TimeLedger(read_totals(directory), directory.all_events())
    wall_s = max(event.time_s or 0.0 for event in directory.all_events()) - (first.time_s or 0.0)
    before, after = ledger.accounts
    seconds = sum(before.seconds.values()) + sum(after.seconds.values())
    assert seconds == pytest.approx(wall_s, rel=0.01)
    assert summary_of(Path(directory.uri))["wall_s"] == pytest.approx(wall_s, rel=0.05)

    last_s = max(line["time_s"] for line in history.lines if line["attempt"] == 1)
    next_s = min(line["time_s"] - line["step_s"] for line in history.lines if line["attempt"] == 2 and line["step_s"])
    gap_s = sum(after.seconds.get(part, 0.0) for part in ("detection", "start-up", "restore"))
    assert gap_s == pytest.approx(next_s - last_s, abs=0.01 * wall_s)
    assert after.seconds["detection"] == pytest.approx((again.time_s or 0.0) - last_s, abs=0.01)
    assert (again.time_s or 0.0) > killed_s
    (interruption,) = read_interruptions(directory.all_events())
    assert interruption.kind == "failure"
    assert interruption.lost_s == pytest.approx(gap_s, abs=0.01 * wall_s)


def test_max_restarts_leaves_a_bad_step_out(command: Commands) -> None:
    run = command(launcher=[*STANDALONE, "--max-restarts", "1"])
    check_finished(run.start(*OVERRIDES, "faults.inject=[{kind: nan_at, step: 60, rank: 1, times: null}]"))
    history = check_ledger(run.directory, STEPS)
    assert [step for step, line in history.committed.items() if line.get("skipped")] == [60]
    assert summary_of(run.directory)["samples"] == sum(line["num_samples"] for line in history.committed.values())
    assert summary_of(run.directory)["attempts"] == 2


def test_two_nodes_meet_at_a_rendezvous(command: Commands) -> None:
    rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29611", "--rdzv-id", "run"]
    nodes = [command(launcher=[*TORCHRUN, *rendezvous]).start(*OVERRIDES, log=f"node{i}.txt") for i in range(2)]
    codes = [node.wait().code for node in nodes]
    assert codes == [0, 0]
    history = check_ledger(nodes[0].directory, STEPS)
    assert {line["world_size"] for line in history.lines} == {2}


def test_ctrl_c_under_torchrun_checkpoints_and_resumes(command: Commands) -> None:
    run = command(launcher=STANDALONE)
    running = run.start(*OVERRIDES, "run.steps=2000")
    running.wait_for_step(50)
    running.interrupt()
    running.wait(60)
    reached = summary_of(run.directory)
    assert reached["status"] == "stopped"
    finished = check_finished(run.start(*OVERRIDES, f"run.steps={reached['step'] + 20}"))
    assert "restored from checkpoint" in finished.output


@pytest.mark.slow
def test_a_run_that_is_extended_uses_each_sample_once(command: Commands) -> None:
    """Of 1438 samples in steps of 64: an epoch ends with a step of 30, and the next one begins behind it."""
    run = command(launcher=STANDALONE, config="digits.yaml")
    for length in ("run.epochs=1", "run.steps=30", "run.epochs=2"):
        check_finished(run.start(length, "run.report=false", small=False))
    committed = check_ledger(run.directory, 46).committed
    assert [step for step, line in committed.items() if line["num_samples"] < 64] == [23, 46]
    assert summary_of(run.directory)["samples"] == 2 * 1438


FAILS = ["task.target=tests.examples.ragged:FailsAtStep7", "data.target=tests.examples.digits:dataset"]


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["optimizer.lrr=1"], "error: override: optimizer.lrr: unknown key; nearest is lr", 2),
        (FAILS, "ValueError: a bug in the user's loss", 1),
    ],
    ids=["a wrong key", "user code"],
)
def test_an_error_of_all_ranks_is_told_by_one(command: Commands, words: list[str], message: str, code: int) -> None:
    finished = command(launcher=STANDALONE, config="digits.yaml").run(*words, "run.epochs=2", small=False)
    said, _, of_torchrun = finished.output.partition("ChildFailedError")
    assert said.count(message) == 1, finished.output
    assert "app/steadfast/cli.py" not in said
    assert of_torchrun.count(f"traceback : {message}") == 1
    assert f"exitcode  : {code} " in of_torchrun
    assert "<NO_OTHER_FAILURES>" in of_torchrun
