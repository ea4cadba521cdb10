"""Libraries of Ray: `steadfast.fit` in a program that has started Ray, in trials of Ray Tune, and rows of Ray Data."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from steadfast.analysis.audit import audit
from steadfast.config import parse_config
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from tests.cluster.elastic_fit import STEPS
from tests.support.checks import summary_of
from tests.support.programs import run_program

# These programs join the Ray that another test may have started on this machine.
pytestmark = [pytest.mark.ray, pytest.mark.alone, pytest.mark.timeout(300)]


# One program, because a start of Ray takes longer than all the training.
def test_fit_under_ray_equals_fit_in_one_process_after_a_worker_was_killed(tmp_path: Path) -> None:
    lines = run_program("tests/cluster/elastic_fit.py", tmp_path, timeout_s=280).splitlines()
    (line,) = [line for line in lines if line.startswith("{")]
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
def test_ray_tune_searches_a_rate_by_fit_in_the_processes_of_its_trials(tmp_path: Path) -> None:
    # Ray may still print lines of the trials after the program's own last line.
    lines = run_program("tests/examples/tune_fit.py", tmp_path, timeout_s=280).splitlines()
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
def test_a_trial_of_ray_tune_that_is_killed_is_one_result_with_the_undisturbed_loss(tmp_path: Path) -> None:
    lines = run_program("-c", KILLED, tmp_path, timeout_s=280).splitlines()
    found = next(line for line in lines if line.startswith("[[("))
    undisturbed, killed = ast.literal_eval(found[: found.index("]]") + 2])
    assert killed == undisturbed
    assert len(killed) == 2
    assert found.endswith("[0, 0]")
    for rate in ("0.001", "0.1"):
        assert summary_of(tmp_path / "killed" / f"lr-{rate}")["attempts"] == 2


def rows() -> Any:
    from ray import data

    return data.range(5000, override_num_blocks=20).map(lambda row: {"id": row["id"], "square": row["id"] ** 2})


@pytest.mark.slow
def test_rows_of_ray_data_become_shards(tmp_path: Path) -> None:
    (tmp_path / "stream.yaml").write_text('data: {target: "tests.cluster.test_fit_under_ray:rows"}\n')
    words = ["-m", "steadfast", "index", "--config", "stream.yaml", "--out", "shards"]
    run_program(*words, cwd=tmp_path, timeout_s=170)
    found = parquet.read_table(tmp_path / "shards")
    assert found.column("id").to_pylist() == list(range(5000))
    assert found.column("square").to_pylist()[-1] == 4999**2
