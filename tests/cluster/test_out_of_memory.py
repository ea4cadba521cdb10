"""Memory runs out in a worker's forward: all go on with smaller ones, under Ray as under torchrun."""

from __future__ import annotations

import pytest

from tests.support.checks import check_ledger, summary_of, weights_of
from tests.support.command import STANDALONE, Command, Commands

# A microbatch is of eight samples.
WORDS = ["run.steps=150", "model.dropout=0", "precision.kind=fp64", "checkpoint.every=20 steps"]
OOM = "{kind: oom_at, step: 50, rank: 1, times: 2}"
SLOW = "{kind: slow_at, ranks: [0, 1], ms: 10}"  # or the steps that are left may be over before a look at who does them


def check_equal(run: Command, undisturbed: Command) -> None:
    expected = weights_of(undisturbed.directory)
    for name, weight in weights_of(run.directory).items():
        assert (weight - expected[name]).abs().max() <= 1e-10


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_nobody_is_replaced_and_no_step_is_done_again(on_head: Commands, command: Commands) -> None:
    undisturbed = command("undisturbed", launcher=STANDALONE)
    assert undisturbed.run(*WORDS).code == 0
    run = on_head("run")
    running = run.start(*WORDS, f"faults.inject=[{OOM}, {SLOW}]", "scaling.num_workers=2")
    running.wait_for_event("attempt_started", attempt=1, world_size=2, timeout_s=150)
    pids = running.worker_pids("SlotWorker")
    running.wait_for_event("attempt_started", attempt=3, world_size=2)
    assert running.worker_pids("SlotWorker") == pids
    finished = running.wait()
    assert finished.code == 0, finished.output
    assert "out of memory in step 50: from now on forwards have at most 4 samples" in finished.output
    shrunk = [event["forward_size"] for event in running.events if event["event"] == "forwards_shrunk"]
    assert shrunk == [4, 2]
    assert [event for event in running.events if event["event"] == "failure"] == []
    assert check_ledger(run.directory, 150).num_lost == 0
    check_equal(run, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_starts_the_ranks_again(command: Commands) -> None:
    undisturbed = command("undisturbed", launcher=STANDALONE)
    assert undisturbed.run(*WORDS).code == 0
    run = command("run", launcher=[*STANDALONE, "--max-restarts", "2"])
    finished = run.run(*WORDS, f"faults.inject=[{OOM}]")
    assert finished.code == 0, finished.output
    assert summary_of(run.directory)["attempts"] == 3
    check_ledger(run.directory, 150)
    check_equal(run, undisturbed)
