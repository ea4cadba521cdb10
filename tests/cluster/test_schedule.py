"""World 4 -> 3 -> 1 -> 2 -> 4 with kills between, on real raylets: the result is that of an undisturbed run."""

from __future__ import annotations

import os
import signal
import time

import pytest

from app.chaos.bed import Bed
from tests.checks import check_ledger, summary_of, weights_of
from tests.command import descendants

STEPS = 60
# Five microbatches, which neither two, three nor four workers share evenly; slow enough to act between two steps.
WORDS = [
    f"run.steps={STEPS}",
    "batch.global_size=40",
    "checkpoint.every=5 steps",
    "precision.kind=fp64",
    "faults.inject=[{kind: slow_at, ranks: [0, 1, 2, 3], ms: 200}]",
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_any_schedule_of_worlds_and_kills_gives_the_weights_of_an_undisturbed_run(command, kind):
    undisturbed = command("undisturbed")
    words = [*WORDS, f"parallel.kind={kind}"]
    assert undisturbed.run(*words, "faults.inject=[]", "scaling.num_workers=1").code == 0

    with Bed(num_nodes=4) as bed:
        running = command("disturbed").start(*words, f"cluster.address={bed.address}", "scaling.num_workers=4")
        running.wait_for_step(3)
        for bounds, size in (("1:3", 3), ("1", 1), ("2", 2), ("4", 4)):
            before = time.time()
            if running.history.lines[-1]["world_size"] > 1:  # the only one that holds the state is let live
                kill_newest()
            assert running.scale(bounds).returncode == 0
            running.wait_until(lambda: trains(running, size, after=before), f"a world of {size}")  # noqa: B023
        finished = running.wait(300)

    assert finished.code == 0, finished.output
    history = check_ledger(running.directory, STEPS)
    assert {1, 2, 3, 4} == {line["world_size"] for line in history.lines}
    if kind == "ddp":
        assert summary_of(running.directory)["lost_steps"] == 0
    ours, theirs = weights_of(running.directory), weights_of(undisturbed.directory)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-10


def kill_newest():
    """The raylets are this process's children."""
    os.kill(max(pid for pid, title in descendants(os.getpid()) if "SlotWorker" in title), signal.SIGKILL)


def trains(running, size, after):
    """Whether a world of that size has committed a step."""
    last = running.history.lines[-1]
    return last["world_size"] == size and last["time_s"] > after
