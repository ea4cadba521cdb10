"""Nodes come and go while the run goes on, also in pipelines and in layouts that change with them."""

import sys
from pathlib import Path

import pytest
import torch

from tests.support.bed import Bed
from tests.support.checks import check_replica_waits, check_stopped
from tests.support.command import FOR_EVER, Commands, Running
from tests.support.programs import run_program

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_node_is_drained_another_comes_and_one_is_lost(command: Commands) -> None:
    with Bed(num_nodes=2) as bed:
        drained, lost = bed.nodes
        running = command().start(FOR_EVER, f"cluster.address={bed.address}", "scaling.num_workers=[1,2]")
        running.wait_for_event("attempt_started", attempt=1, world_size=2)

        deadline_s = bed.drain(drained, seconds=20)
        left = running.wait_for_event("attempt_started", attempt=2, world_size=1, source="rank 0")
        assert left["time_s"] < deadline_s
        assert running.wait_for_event("preemption", node=drained)["deadline_s"] == pytest.approx(deadline_s, abs=1)
        bed.lose(drained)

        bed.add()
        running.wait_for_event("attempt_started", attempt=3, world_size=2, source="rank 0")
        bed.lose(lost)
        running.wait_for_event("attempt_started", attempt=4, world_size=1, source="rank 0")
        check_stopped(running)
    assert [(e["kind"], e["node"]) for e in running.events if e["event"] == "failure"] == [("worker", lost)]


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_a_lost_node_costs_hardly_a_step_where_storage_has_nothing(command: Commands, kind: str) -> None:
    """All checkpoints are taken away before: what is restored comes from the memory of the nodes that are left."""
    with Bed(num_nodes=3) as bed:
        placed = [f"cluster.address={bed.address}", "scaling.num_workers=[2,3]", f"parallel.kind={kind}"]
        running = command().start(FOR_EVER, *placed, "checkpoint.every=1000 minutes")
        started = running.wait_for_event("attempt_started", world_size=3)
        if kind == "fsdp":
            running.wait_for_event("snapshot", attempt=started["attempt"])
        running.wait_for_step(running.history.last_step + 20)
        assert not list(running.directory.glob("checkpoints/*"))
        bed.lose(bed.nodes[1])
        restored = running.wait_for_event("restore", attempt=started["attempt"] + 1)
        again = restored["step"] + restored["lost_steps"]
        running.wait_until(lambda: running.history.lines[-1]["step"] > again, "the steps that were lost")
        check_stopped(running, restored["lost_steps"])
    if kind == "ddp":
        assert restored["source"].startswith("rank")
        assert restored["lost_steps"] <= 1
    else:
        assert restored["source"] == "snapshot"
        ended = [line for line in running.history.lines if line["attempt"] == started["attempt"]]
        copied = next(event for event in running.events if event["event"] == "snapshot")
        step_s = (ended[-1]["time_s"] - ended[0]["time_s"]) / len(ended)
        interval_steps = (100 * copied["stall_s"] + copied["stall_s"]) / step_s
        assert restored["lost_steps"] <= 2 * interval_steps + 2, "the newest copy may have been under way"


@pytest.mark.slow
def test_when_all_nodes_are_drained_what_they_hold_is_written_down(command: Commands) -> None:
    with Bed(num_nodes=1) as bed:
        words = (FOR_EVER, f"cluster.address={bed.address}", "scaling.num_workers=1", "recovery.wait_s=60")
        running = command().start(*words)
        running.wait_for_step(20)
        bed.drain(bed.nodes[0], seconds=30)
        saved = running.wait_for_event("checkpoint")
        bed.add()
        restored = running.wait_for_event("restore", source="checkpoint")
        assert restored["step"] == saved["step"]
        assert restored["lost_steps"] == 0
        check_stopped(running)


def test_a_run_that_no_node_is_left_for_says_what_is_missing_and_ends(command: Commands) -> None:
    with Bed(num_nodes=1) as bed:
        words = (FOR_EVER, f"cluster.address={bed.address}", "scaling.num_workers=1", "recovery.wait_s=8")
        running = command().start(*words, "checkpoint.every=10 steps")
        running.wait_for_step(20)
        bed.lose(bed.nodes[0])
        finished = running.wait()
    assert finished.code == 1
    assert "waited 8 s for workers: 0 of at least 1 (scaling.num_workers) have joined; 0 CPUs" in finished.output


def test_a_node_on_which_workers_die_at_once_gets_no_more_of_them(command: Commands, tmp_path: Path) -> None:
    with Bed(num_nodes=2) as bed:
        poisoned = bed.nodes[1]
        (tmp_path / "poisoned").write_text(poisoned)
        data = f"data={{target: 'tests.examples.poisoned:dataset', args: {{folder: {tmp_path}, context_length: 32}}}}"
        running = command().start(FOR_EVER, f"cluster.address={bed.address}", "scaling.num_workers=[1,2]", data)
        assert running.wait_for_event("node_quarantined")["node"] == poisoned
        died_there = placements(tmp_path).count(poisoned)
        new = bed.add()
        running.wait_for_event("attempt_started", world_size=2)
        assert new in placements(tmp_path)
        assert placements(tmp_path).count(poisoned) == died_there == 3
        running.interrupt()
        assert running.wait().code == 3


@pytest.mark.more
def test_a_node_whose_python_cannot_run_is_named_and_the_others_train(
    command: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"')
    python.chmod(0o755)
    with Bed(num_nodes=0) as bed:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(python))
            broken = bed.add()
        python.unlink()
        words = FOR_EVER, f"cluster.address={bed.address}", "scaling.num_workers=[1,2]"
        alone = command().start(*words).wait()
        assert alone.code == 2
        assert f"its program cannot run: {python}: No such file or directory" in alone.output

        bed.add()
        running = command().start(*words)
        failure = running.wait_for_event("failure", node=broken)
        assert failure["error"].endswith(f"its program cannot run: {python}: No such file or directory")
        started = running.wait_for_event("attempt_started", world_size=1)
        assert failure["time_s"] < started["time_s"] + 10
        check_stopped(running)


def placements(folder: Path) -> list[str]:
    return (folder / "placements").read_text().split()


@pytest.mark.slow
def test_a_replica_that_loses_a_worker_waits_for_another_and_the_others_go_on(command: Commands) -> None:
    """Nothing is on storage: what is restored is what living replicas hold."""
    words = ["parallel={kind: fsdp, shard_size: 2}", "scaling.num_workers=[2,4]", "checkpoint.every=1000 minutes"]
    with Bed(num_nodes=4) as bed:
        running = command().start(FOR_EVER, f"cluster.address={bed.address}", *words)
        check_replica_waits(running, bed, after_step=20)


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
    run_program("main.py", "audit", run)
    run_program("main.py", "export", run, "--out", out)
    weights: dict[str, torch.Tensor] = torch.load(out)
    return weights
