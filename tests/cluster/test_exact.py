"""`run.exact` by the literal command: one hash under torchrun and under Ray, with a worker killed on the way."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.checks import check_identical, check_ledger, summary_of
from tests.support.command import Commands
from tests.support.history import History

EXACT = ["run.exact=true", "run.steps=300", "model.dropout=0.1"]


def worlds_of(history: History) -> set[int]:
    return {line["world_size"] for line in history.committed.values()}


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_workers_that_come_and_go_change_no_bit(command: Commands, on_head: Commands) -> None:
    alone = command("alone", launcher=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"])
    assert alone.run(*EXACT).code == 0
    killed = on_head("killed")
    running = killed.start(*EXACT, "scaling.num_workers=[1,2]")
    running.wait_for_event("attempt_started", attempt=1, world_size=2)
    running.wait_for_step(40)
    os.kill(running.worker_pids("SlotWorker")[0], signal.SIGKILL)
    finished = running.wait()
    assert finished.code == 0, finished.output
    check_ledger(killed.directory, 300)
    assert worlds_of(running.history) == {1, 2}
    check_identical(alone.directory, killed.directory)
    digests = [line.get("weights") for line in running.history.committed.values() if line["step"] % 100 == 0]
    assert len(set(digests)) == 3
    assert None not in digests
    assert summary_of(killed.directory)["lost_steps"] == 0
