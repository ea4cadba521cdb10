"""Workers are killed, come and go: the result is that of an undisturbed run, to the bit where that is claimed."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.bed import Bed
from tests.support.checks import check_finished, check_identical, check_ledger, differences, distance, summary_of
from tests.support.command import STANDALONE, TORCHRUN, Command, Commands, Running, descendants
from tests.support.pace import set_pace

pytestmark = pytest.mark.ray

STEPS = 120
INTERVAL = 25
OVERRIDES = [f"run.steps={STEPS}", f"checkpoint.every={INTERVAL} steps", "scaling.num_workers=2"]


@pytest.mark.timeout(240)
def test_a_run_whose_workers_are_killed_is_identical_to_an_undisturbed_one_of_torchrun(
    command: Commands, on_head: Commands
) -> None:
    undisturbed = command("undisturbed", launcher=STANDALONE)
    assert undisturbed.run(*OVERRIDES).code == 0

    # A new Python, so that an import of the command that breaks shows here.
    killed = on_head("killed", warm=None)
    running = killed.start(*OVERRIDES)
    running.wait_for_step(40)
    running.kill_workers(1)
    running.wait_for_event("attempt_started", attempt=2)
    running.wait_for_step(70)
    running.kill_workers(2)
    check_finished(running)
    check_identical(killed.directory, undisturbed.directory)
    history = check_ledger(killed.directory, STEPS)
    summary = summary_of(killed.directory)
    assert summary["attempts"] == 3
    assert summary["lost_steps"] == history.num_lost <= INTERVAL
    assert {line["world_size"] for line in history.lines} == {2}
    one_died, all_died = [event for event in running.events if event["event"] == "restore"]
    assert (one_died["source"], one_died["lost_steps"]) == ("rank 0", 0)
    assert all_died["source"] in ("checkpoint", "snapshot")
    assert all_died["lost_steps"] <= INTERVAL


EXACT = ["run.exact=true", "run.steps=300", "model.dropout=0.1"]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_workers_that_come_and_go_change_no_bit_of_an_exact_run(command: Commands, on_head: Commands) -> None:
    alone = command("alone", launcher=[*TORCHRUN, "--standalone", "--nproc-per-node", "1"])
    assert alone.run(*EXACT).code == 0
    killed = on_head("killed")
    running = killed.start(*EXACT, "scaling.num_workers=[1,2]")
    running.wait_for_event("attempt_started", attempt=1, world_size=2)
    running.wait_for_step(40)
    os.kill(running.worker_pids()[0], signal.SIGKILL)
    check_finished(running)
    check_ledger(killed.directory, 300)
    assert {line["world_size"] for line in running.history.committed.values()} == {1, 2}
    check_identical(alone.directory, killed.directory)
    digests = [line.get("weights") for line in running.history.committed.values() if line["step"] % 100 == 0]
    assert len(set(digests)) == 3
    assert None not in digests
    assert summary_of(killed.directory)["lost_steps"] == 0


RESIZED_STEPS = 60
# Five microbatches, which neither two, three nor four workers share evenly.
WORDS = [f"run.steps={RESIZED_STEPS}", "batch.global_size=40", "checkpoint.every=5 steps"]
HELD_S = 0.8  # a forward while a world is awaited: or the run may end before workers have started


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_fp64_weights_equal_those_of_an_undisturbed_run(command: Commands, on_head: Commands, kind: str) -> None:
    words = [*WORDS, f"parallel.kind={kind}", "precision.kind=fp64"]
    ours, theirs = disturb(command("disturbed"), *words), train(on_head("undisturbed"), *words)
    if kind == "ddp":
        assert summary_of(ours)["lost_steps"] == 0
    assert max(float(each.abs().max()) for each in differences(ours, theirs)) <= 1e-10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fp32_result_is_equivalent_to_that_of_undisturbed_runs(command: Commands, on_head: Commands) -> None:
    words = [*WORDS, "precision.kind=fp32"]
    ours, one = disturb(command("disturbed"), *words), train(on_head("one"), *words)
    two = train(on_head("two"), *words, "scaling.num_workers=2")
    losses = [summary_of(directory)["metrics"]["loss"] for directory in (ours, one)]
    assert losses[0] == pytest.approx(losses[1], rel=0.002)
    assert distance(ours, one) <= 3 * distance(one, two)


def disturb(command: Command, *words: str) -> Path:
    """The run directory of a run of which everything is changed that may change."""
    pace = command.storage / "pace"
    set_pace(pace, HELD_S)
    paced = f"task={{target: 'tests.support.pace:Paced', args: {{file: {pace}}}}}"
    with Bed(num_nodes=4) as bed:
        running = command.start(*words, paced, f"cluster.address={bed.address}", "scaling.num_workers=4")
        running.wait_for_step(3, timeout_s=200)  # four workers start
        for bounds, size in (("1:3", 3), ("1", 1), ("2", 2), ("4", 4)):
            before = time.time()
            if running.history.lines[-1]["world_size"] > 1:  # the only one that holds the state is let live
                kill_newest()
            assert running.scale(bounds).returncode == 0
            running.wait_until(lambda: trains(running, size, after=before), f"a world of {size}")  # noqa: B023
        set_pace(pace, None)
        check_finished(running, 300)
    history = check_ledger(running.directory, RESIZED_STEPS)
    assert {1, 2, 3, 4} == {line["world_size"] for line in history.lines}
    return running.directory


def train(command: Command, *words: str) -> Path:
    """The run directory of an undisturbed run of one worker, unless `words` say otherwise."""
    check_finished(command.start("scaling.num_workers=1", *words))
    return command.directory


def kill_newest() -> None:
    """The raylets are this process's children."""
    os.kill(max(pid for pid, title in descendants(os.getpid()) if "SlotWorker" in title), signal.SIGKILL)


def trains(running: Running, size: int, after: float) -> bool:
    """Whether a world of that size has done a step itself."""
    last = running.history.lines[-1]
    done = last.get("confirmed") is not False  # or it is one that its members have brought along
    return bool(done and last["world_size"] == size and last["time_s"] > after)
