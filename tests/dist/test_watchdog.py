"""Stalls in real processes, each named by the policy over what all of them say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.faults.watchdog import Limits
from tests.dist.checks import check_run
from tests.dist.reference import reference
from tests.dist.small import small
from tests.dist.watched import watch

SHORT = Limits(step_s=1.5, rare_s=1.5)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_hangs_is_named_with_its_phase(tmp_path: Path, kind: str, rank: int) -> None:
    at = {"loader": 5, "forward": 7, "collective": 9, "checkpoint": 12}
    faults = ", ".join(f"{{kind: hang_at, phase: {phase}, step: {at[phase]}, rank: {rank}}}" for phase in at)
    config = small(tmp_path, f"parallel.kind={kind}", "checkpoint.every=4 steps", f"faults.inject=[{faults}]")
    watched = watch(config, [3], SHORT)
    check_run(watched.run, reference(config))  # it only delayed the run
    assert [(stall.ranks, stall.phase) for stall in watched.stalls] == [((rank,), phase) for phase in at]
    others = {str(member) for member in range(3)} - {str(rank)}
    for stall, stacks in zip(watched.stalls, watched.stacks, strict=True):
        assert set(stall.waiting) == others
        assert "in sleep" in stacks[str(rank)].split("\n\n")[0]
        assert not any("in sleep" in stacks[member] for member in others)
    if kind == "ddp":  # whose forward waits for nobody
        assert [{phases[member] for member in others} for phases in watched.phases[:2]] == [{"backward"}] * 2


def test_a_run_in_which_nobody_hangs_raises_no_alarm(tmp_path: Path) -> None:
    """With joiners, validations, checkpoints and loader processes."""
    overrides = ["run.steps=300", "checkpoint.every=25 steps", "validation.every=10 steps", "data.num_workers=1"]
    watched = watch(small(tmp_path, *overrides), [2, 3, 2], Limits(), leave_after=[100, 100])
    assert watched.run.summary["status"] == "finished"
    assert watched.stalls == []
    assert watched.num_looks
