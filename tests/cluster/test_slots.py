"""`recovery.mode=slots`: a killed worker does not end the others."""

import os
import signal

import pytest

from app.files import last_line
from tests.checks import check_ledger, summary_of
from tests.command import is_alive

STEPS = 400
OVERRIDES = [f"run.steps={STEPS}", "scaling.num_workers=[1,2]"]


@pytest.mark.timeout(240)
def test_a_survivor_keeps_running_and_the_worker_that_replaces_the_killed_one_joins_it(command):
    running = command().start(*OVERRIDES)
    running.wait_for_event("attempt_started", attempt=1, world_size=2)
    running.wait_for_step(60)
    killed, survivor = running.worker_pids("SlotWorker")
    os.kill(killed, signal.SIGKILL)
    running.wait_for_event("attempt_started", attempt=2, world_size=1, source="rank 0")
    running.wait_for_event("attempt_started", attempt=3, world_size=2, source="rank 0")
    assert is_alive(survivor)
    finished = running.wait()

    assert finished.code == 0, finished.output
    history = check_ledger(running.directory, STEPS)
    assert history.num_lost == 0
    unconfirmed = [line["step"] for line in history.lines if line.get("confirmed") is False]
    assert len(unconfirmed) <= 10  # the steps whose words were under way
    assert summary_of(running.directory)["lost_steps"] == 0
    assert last_line(running.directory / "steps.jsonl")["world_size"] == 2
