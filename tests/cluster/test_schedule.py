"""World 4 -> 3 -> 1 -> 2 -> 4 with kills between, on real raylets: the result is that of an undisturbed run."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed.checkpoint as dcp

from app.chaos.bed import Bed
from app.checkpoint.state import app_state, flatten
from app.config import parse_config
from app.kept import Kept
from app.optim import build_optimizer
from tests.checks import check_ledger, summary_of

STEPS = 100
# Five microbatches, which neither two, three nor four workers share evenly; slow enough to act between two steps.
WORDS = [
    f"run.steps={STEPS}",
    "batch.global_size=40",
    "checkpoint.every=5 steps",
    "precision.kind=fp64",
    "faults.inject=[{kind: slow_at, ranks: [0, 1, 2, 3], ms: 300}]",
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_any_schedule_of_worlds_and_kills_gives_the_weights_of_an_undisturbed_run(command, kind):
    undisturbed = command("undisturbed")
    words = [*WORDS, f"parallel.kind={kind}"]
    assert undisturbed.run(*words, "faults.inject=[]", "scaling.num_workers=1").code == 0

    with Bed(num_nodes=4) as bed:
        running = command("disturbed").start(*words, f"cluster.address={bed.address}", "scaling.num_workers=4")
        running.wait_for_event("attempt_started", world_size=4)
        for bounds, size in (("1:3", 3), ("1", 1), ("2", 2), ("4", 4)):
            before = running.events[-1]["time_s"]
            kill_newest(running)
            assert running.scale(bounds).returncode == 0
            running.wait_until(lambda: began(running, size, after=before), f"a world of {size}")  # noqa: B023
        finished = running.wait(300)

    assert finished.code == 0, finished.output
    history = check_ledger(running.directory, STEPS)
    assert {1, 2, 3, 4} == {line["world_size"] for line in history.lines}
    if kind == "ddp":
        assert summary_of(running.directory)["lost_steps"] == 0
    ours, theirs = weights(running.directory), weights(undisturbed.directory)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) <= 1e-10


def kill_newest(running):
    os.kill(running.worker_pids("SlotWorker")[-1], signal.SIGKILL)


def began(running, size, after):
    """Whether the newest world is of that size."""
    started = [e for e in running.events if e["event"] == "attempt_started" and e["time_s"] > after]
    return bool(started) and started[-1]["world_size"] == size


def weights(directory):
    """Of the last checkpoint, whole."""
    config = parse_config((directory / "config.yaml").read_text())
    kept = Kept(config, torch.device("cpu"))
    state = app_state(kept.model, build_optimizer(config.optimizer, kept.model))
    dcp.load(state, checkpoint_id=summary_of(directory)["last_checkpoint"], no_dist=True)
    return flatten(state["model"])
