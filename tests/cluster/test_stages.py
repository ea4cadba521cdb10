"""A pipeline under Ray: a worker is lost, its replica waits for another, and the other replica trains on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.bed import Bed
from tests.support.checks import check_replica_waits
from tests.support.command import FOR_EVER, ROOT, Commands

pytestmark = pytest.mark.ray

SAME = ["precision.kind=fp64", "schedule.kind=constant", "model.dropout=0.1"]
STAGES = ["parallel={kind: pipeline, stages: 2}", "scaling.num_workers=[2,4]", "checkpoint.every=1000 minutes"]


@pytest.mark.timeout(400)
def test_a_pipeline_that_loses_a_worker_ends_with_the_weights_of_one_worker(command: Commands, tmp_path: Path) -> None:
    with Bed(num_nodes=4) as bed:
        running = command("stages").start(FOR_EVER, f"cluster.address={bed.address}", *SAME, *STAGES)
        check_replica_waits(running, bed, after_step=10)
    last = max(running.history.committed)
    alone = command("alone")
    assert alone.run(f"run.steps={last}", *SAME, "scaling.num_workers=1").code == 0
    found, expected = exported(running.directory, tmp_path), exported(alone.directory, tmp_path)
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-10


def exported(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return what plain torch loads from the export of an audited run."""
    out = folder / f"{run.name}.pt"
    for words in (["audit", str(run)], ["export", str(run), "--out", str(out)]):
        subprocess.run([sys.executable, "main.py", *words], cwd=ROOT, check=True, timeout=120)
    weights: dict[str, torch.Tensor] = torch.load(out)
    return weights
