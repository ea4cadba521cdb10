"""Stalls in real processes, each named by the policy over what all of them say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadfast.world.progress import Limits
from tests.dist.watched import watch
from tests.support.claims import check_run
from tests.support.reference import reference
from tests.support.small import small

SHORT = Limits(step_s=1.5, rare_s=1.5)


@pytest.mark.parametrize(
    ("rank", "kind"),
    [
        (0, "fsdp"),
        (2, "ddp"),
        pytest.param(0, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_hangs_is_named_with_its_phase(tmp_path: Path, rank: int, kind: str) -> None:
    at = {"loader": 5, "forward": 7, "collective": 9, "checkpoint": 12}
    faults = ", ".join(f"{{kind: hang_at, phase: {phase}, step: {at[phase]}, rank: {rank}}}" for phase in at)
    config = small(tmp_path, f"parallel.kind={kind}", "checkpoint.every=4 steps", f"faults.inject=[{faults}]")
    watched = watch(config, [3], SHORT)
    check_run(watched.run, reference(config))  # it only delayed the run
    assert [(hang.ranks, hang.phase) for hang in watched.hangs] == [((rank,), phase) for phase in at]
    others = {str(member) for member in range(3)} - {str(rank)}
    for hang, stacks in zip(watched.hangs, watched.stacks, strict=True):
        assert set(hang.waiting) == others
        assert "in sleep" in stacks[str(rank)].split("\n\n")[0]
        assert not any("in sleep" in stacks[member] for member in others)
    if kind == "ddp":  # whose forward waits for nobody
        assert [{phases[member] for member in others} for phases in watched.phases[:2]] == [{"gradients"}] * 2


def test_a_hang_before_the_first_step_of_a_resumed_run_is_told_of_the_step_before(tmp_path: Path) -> None:
    hang = "{kind: hang_at, phase: loader, step: 6, rank: 1}"
    config = small(tmp_path, "checkpoint.every=5 steps", f"faults.inject=[{hang}]")
    watched = watch(config, [2, 2], SHORT, leave_after=[5])
    assert [(each.phase, each.step) for each in watched.hangs] == [("loader", 5)]


@pytest.mark.parametrize("steps", [90, pytest.param(300, marks=pytest.mark.slow)])
def test_a_run_in_which_nobody_hangs_raises_no_alarm(tmp_path: Path, steps: int) -> None:
    """With joiners, validations, checkpoints and loader processes."""
    overrides = [f"run.steps={steps}", "checkpoint.every=25 steps", "validation.every=10 steps", "data.num_workers=1"]
    watched = watch(small(tmp_path, *overrides), [2, 3, 2], Limits(), leave_after=[steps // 3, steps // 3])
    assert watched.run.summary["status"] == "finished"
    assert watched.hangs == []
    assert watched.num_looks
