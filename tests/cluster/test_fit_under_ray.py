"""`steadfast.fit` in a program that has started Ray: elastic workers train objects of the program."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from steadfast.analysis.audit import audit
from steadfast.config import parse_config
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from tests.cluster.elastic_fit import STEPS
from tests.support.checks import summary_of
from tests.support.command import ROOT

pytestmark = pytest.mark.ray


# One program, because a start of Ray takes longer than all the training.
@pytest.mark.timeout(300)
def test_fit_under_ray_equals_fit_in_one_process_after_a_worker_was_killed(tmp_path: Path) -> None:
    (line,) = [line for line in run_program("tests/cluster/elastic_fit.py", tmp_path) if line.startswith("{")]
    told = json.loads(line)

    killed = told["killed"]
    assert (killed["status"], killed["step"], killed["attempts"], killed["lost_steps"]) == ("finished", STEPS, 2, 0)
    assert told["difference"] <= 1e-10
    directory = RunDirectory(LocalStore(tmp_path / "killed"))
    config = parse_config((tmp_path / "killed" / "config.yaml").read_text())
    proof = audit(directory, config, 4000)
    assert (proof.steps, proof.samples) == (STEPS, STEPS * 12)

    assert told["again"] == [True, 0.0]  # the same call returns the finished model
    assert "optimizer.lr: 0.02 -> 0.5" in told["another_rate"]
    status, step = told["stopped"]
    assert status == "stopped"
    assert 5 <= step < STEPS
    assert told["resumed"][:2] == ["finished", STEPS]
    assert told["resumed"][2] <= 1e-10
    # The program's own Ray stays, and nothing of the runs is left there.
    assert (told["ray"], told["actors"]) == (True, [])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ray_tune_searches_a_rate_by_fit_in_the_processes_of_its_trials(tmp_path: Path) -> None:
    # Ray may still print lines of the trials after the program's own last line.
    lines = run_program("tests/examples/tune_fit.py", tmp_path)
    assert any(line.startswith("the best rate is 0.1, with a loss of ") for line in lines), lines
    for rate in ("0.001", "0.1"):
        assert summary_of(tmp_path / f"lr-{rate}")["status"] == "finished"


KILLED = """
import sys
from tests.examples.tune_fit import search
storage = sys.argv[1]
kill = {"kind": "kill_at", "step": 8, "rank": 0}
grids = [search(f"{storage}/undisturbed"), search(f"{storage}/killed", inject=[kill])]
losses = [[(result.config["lr"], result.metrics["loss"]) for result in grid] for grid in grids]
print(losses, [grid.num_errors for grid in grids])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trial_of_ray_tune_that_is_killed_is_one_result_with_the_undisturbed_loss(tmp_path: Path) -> None:
    lines = run_program("-c", tmp_path, KILLED)
    found = next(line for line in lines if line.startswith("[[("))
    undisturbed, killed = ast.literal_eval(found[: found.index("]]") + 2])
    assert killed == undisturbed
    assert len(killed) == 2
    assert found.endswith("[0, 0]")
    for rate in ("0.001", "0.1"):
        assert summary_of(tmp_path / "killed" / f"lr-{rate}")["attempts"] == 2


def run_program(program: str, storage: Path, *code: str) -> list[str]:
    """Run a program of a user's own. Return the lines of its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "app")])}
    words = [sys.executable, program, *code, str(storage)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()
