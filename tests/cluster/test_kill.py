"""`recovery.mode=restart`: a worker is killed, then all of them; the run ends as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.support.checks import check_identical, check_ledger, summary_of
from tests.support.command import Commands

pytestmark = pytest.mark.ray

STEPS = 400
INTERVAL = 50
OVERRIDES = [f"run.steps={STEPS}", f"checkpoint.every={INTERVAL} steps", "recovery.mode=restart"]


@pytest.mark.timeout(240)
def test_a_run_whose_workers_are_killed_is_identical_to_an_undisturbed_one(on_head: Commands) -> None:
    assert on_head("undisturbed").run(*OVERRIDES).code == 0

    killed = on_head("killed")
    running = killed.start(*OVERRIDES)
    running.wait_for_step(80)
    running.kill_workers(1)
    running.wait_for_event("attempt_started", attempt=2)
    running.wait_for_step(230)
    running.kill_workers(2)
    finished = running.wait()

    assert finished.code == 0, finished.output
    check_identical(killed.directory, on_head("undisturbed").directory)
    history = check_ledger(killed.directory, STEPS)
    summary = summary_of(killed.directory)
    assert summary["attempts"] == 3
    assert summary["lost_steps"] == history.num_lost <= 2 * INTERVAL
    restores = [event for event in running.events if event["event"] == "restore"]
    assert len(restores) == 2
    assert {event["source"] for event in restores} <= {"checkpoint", "snapshot"}
    assert all(event["lost_steps"] <= INTERVAL for event in restores)
