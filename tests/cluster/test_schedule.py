"""World 4 -> 3 -> 1 -> 2 -> 4 with kills between, on real raylets: the result is that of an undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.bed import Bed
from tests.support.checks import check_ledger, differences, distance, summary_of
from tests.support.command import Command, Commands, Running, descendants
from tests.support.pace import set_pace

pytestmark = pytest.mark.ray

STEPS = 60
# Five microbatches, which neither two, three nor four workers share evenly.
WORDS = [f"run.steps={STEPS}", "batch.global_size=40", "checkpoint.every=5 steps"]
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
        finished = running.wait(300)
    assert finished.code == 0, finished.output
    history = check_ledger(running.directory, STEPS)
    assert {1, 2, 3, 4} == {line["world_size"] for line in history.lines}
    return running.directory


def train(command: Command, *words: str) -> Path:
    """The run directory of an undisturbed run of one worker, unless `words` say otherwise."""
    finished = command.run("scaling.num_workers=1", *words)
    assert finished.code == 0, finished.output
    return command.directory


def kill_newest() -> None:
    """The raylets are this process's children."""
    os.kill(max(pid for pid, title in descendants(os.getpid()) if "SlotWorker" in title), signal.SIGKILL)


def trains(running: Running, size: int, after: float) -> bool:
    """Whether a world of that size has done a step itself."""
    last = running.history.lines[-1]
    done = last.get("confirmed") is not False  # or it is one that its members have brought along
    return bool(done and last["world_size"] == size and last["time_s"] > after)
