"""Pipelines and layouts under Ray: workers are lost and join, and the result is that of one worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.bed import Bed
from tests.support.checks import check_stopped
from tests.support.command import FOR_EVER, ROOT, Commands, Running

pytestmark = pytest.mark.ray

SAME = ["precision.kind=fp64", "schedule.kind=constant", "model.dropout=0.1"]
STAGES = ["parallel={kind: pipeline, stages: 2}", "scaling.num_workers=[2,4]", "checkpoint.every=1000 minutes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pipeline_with_lost_workers_that_grows_and_shrinks_has_the_weights_of_one_worker(
    command: Commands, tmp_path: Path
) -> None:
    """Nothing is on storage meanwhile, so the state comes from the other replica."""
    with Bed(num_nodes=4) as bed:
        running = command("stages").start(FOR_EVER, f"cluster.address={bed.address}", *SAME, *STAGES)
        running.wait_for_event("attempt_started", attempt=1, world_size=4)
        for attempt in (2, 4):
            train_some_steps(running)
            bed.kill(bed.nodes[attempt // 2])
            running.wait_for_event("attempt_started", attempt=attempt, world_size=2, source="rank 0")
            bed.add()
            running.wait_for_event("attempt_started", attempt=attempt + 1, world_size=4)
        for attempt, (bounds, size) in enumerate([("2:2", 2), ("2:4", 4)], 6):
            train_some_steps(running)
            assert running.scale(bounds).returncode == 0
            running.wait_for_event("attempt_started", attempt=attempt, world_size=size)
        train_some_steps(running)
        check_stopped(running)
    last = max(running.history.committed)
    alone = command("alone")
    assert alone.run(f"run.steps={last}", *SAME, "scaling.num_workers=1").code == 0
    found, expected = exported(running.directory, tmp_path), exported(alone.directory, tmp_path)
    assert found.keys() == expected.keys()
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_workers_that_are_left_train_on_in_another_layout(command: Commands) -> None:
    words = ["parallel={kind: fsdp, shard_size: auto}", "scaling.num_workers=[2,4]", "checkpoint.every=1000 minutes"]
    with Bed(num_nodes=4) as bed:
        running = command().start(FOR_EVER, f"cluster.address={bed.address}", *words)
        running.wait_for_event("attempt_started", attempt=1, layout="2 x 2")
        train_some_steps(running)
        bed.kill(bed.nodes[1])
        running.wait_for_event("attempt_started", attempt=2, layout="1 x 3", source="snapshot")
        train_some_steps(running)
        bed.add()
        running.wait_for_event("attempt_started", attempt=3, layout="2 x 2")
        train_some_steps(running)
        check_stopped(running)
    assert "layout 2 x 2 -> 1 x 3" in running.output_path.read_text()


def train_some_steps(running: Running) -> None:
    running.wait_for_step(10 + max(running.history.committed, default=0))


def exported(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Return what plain torch loads from the export of an audited run."""
    out = folder / f"{run.name}.pt"
    for words in (["audit", str(run)], ["export", str(run), "--out", str(out)]):
        subprocess.run([sys.executable, "main.py", *words], cwd=ROOT, check=True, timeout=120)
    weights: dict[str, torch.Tensor] = torch.load(out)
    return weights
