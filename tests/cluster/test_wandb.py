"""Weights & Biases itself, offline: one run there, over a kill, a resume and a resize."""

from __future__ import annotations

import json

import pytest

from tests.cluster.wandb_files import offline_runs
from tests.support.command import STANDALONE, TORCHRUN, Commands
from tests.support.curves import check_curve, kill_rank

OVERRIDES = ["trackers=[{kind: wandb, project: drills}]", "logging.every_steps=1", "checkpoint.every=1000 steps"]
SLOW = "faults.inject=[{kind: slow_at, ranks: [0, 1], ms: 30}]"


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_a_run_that_is_killed_resumed_and_resized_is_one_run_there(
    command: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    killed = command(launcher=[*STANDALONE, "--max-restarts", "1"])
    running = killed.start(*OVERRIDES, SLOW, "run.steps=300")
    # W&B takes seconds to open a run, and keeps what comes meanwhile in memory.
    running.wait_until(lambda: any(run.history for run in offline_runs(killed.directory)), "figures there")
    running.wait_for_step(running.history.last_step + 30)
    kill_rank(running, 0)
    finished = running.wait(200)
    assert finished.code == 0, finished.output
    resized = command(launcher=[*TORCHRUN, "--standalone", "--nproc-per-node", "1"])
    finished = resized.run(*OVERRIDES, "run.steps=310", "scaling.num_workers=1")
    assert finished.code == 0, finished.output

    runs = offline_runs(killed.directory)
    known = json.loads((killed.directory / "wandb" / "run.json").read_text())
    assert [run.id for run in runs] == 3 * [known["id"]]
    assert [run.has_ended for run in runs] == [False, True, True]
    assert {run.project for run in runs} == {"drills"}
    told = [row for run in runs for row in run.history if "events/failures" in row]
    assert [(row["events/failures"], row["events/restarts"]) for row in told] == [(0, 0), (1, 0), (1, 1)]
    assert runs[0].config["batch"]["global_size"] == 48

    drawn = {row["_step"]: row["train/loss"] for run in runs for row in run.history if "train/loss" in row}
    check_curve(killed.directory, drawn, 310)
