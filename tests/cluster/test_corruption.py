"""A worker that computes wrongly, on real raylets and under torchrun: it is named, and the result is the right one."""

from __future__ import annotations

import pytest

from steadfast.config import BatchConfig, RunConfig
from steadfast.guards.corruption import Check, choose
from steadfast.plan import Plan, even_shares
from tests.support.bed import Bed
from tests.support.checks import check_identical, check_ledger, summary_of
from tests.support.command import Commands

STEPS, STEP = 60, 20
WORDS = [f"run.steps={STEPS}", "run.deterministic=true", "checkpoint.every=1000 minutes"]
CHECKED = 'recompute.every="10 steps"'


def check_of(size: int) -> Check:
    batch = BatchConfig()
    plan = Plan(batch.global_size, batch.samples_per_microbatch, even_shares(batch.num_microbatches, size))
    check = choose(plan, 10, RunConfig().seed, [""] * size, STEP)
    assert check is not None
    return check


def flip(rank: int, where: str, during: str) -> str:
    fault = f"kind: flip_at, step: {STEP}, rank: {rank}, where: {where}, bit: 21, element: 2, during: {during}"
    return f"faults.inject=[{{{fault}}}]"


@pytest.mark.ray
@pytest.mark.timeout(400)
@pytest.mark.slow
def test_it_is_replaced_on_another_node_and_the_others_go_on_to_the_same_bits(command: Commands) -> None:
    check = check_of(3)
    with Bed(num_nodes=4) as bed:
        on_bed = [*WORDS, f"cluster.address={bed.address}", "scaling.num_workers=3"]
        running = command("disturbed").start(*on_bed, CHECKED, flip(check.owner, "weight", "step"))
        found = running.wait_for_event("corruption", timeout_s=200)  # three workers start
        finished = running.wait(200)
        assert finished.code == 0, finished.output
        undisturbed = command("undisturbed").run(*on_bed, timeout_s=200)
        assert undisturbed.code == 0, undisturbed.output
    assert (found["attempt"], found["step"], found["rank"]) == (1, STEP, check.owner)
    assert f"wrong result found in step {STEP}: rank {check.owner} (host" in finished.output
    (failure,) = [event for event in running.events if event["event"] == "failure"]
    assert (failure["kind"], failure["error"]) == ("corruption", f"computed wrongly in step {STEP}")
    (quarantined,) = [event for event in running.events if event["event"] == "node_quarantined"]
    assert quarantined["node"] == failure["node"]
    started = [event for event in running.events if event["event"] == "attempt_started"]
    assert [(each["attempt"], each["step"], each["world_size"]) for each in started] == [(1, 0, 3), (2, STEP - 1, 3)]
    assert started[1]["source"].startswith("rank ")
    assert check_ledger(running.directory, STEPS).num_lost == 0
    assert summary_of(running.directory)["lost_steps"] == 0
    check_identical(running.directory, running.directory.parent / "undisturbed")


@pytest.mark.timeout(300)
def test_torchrun_ends_with_the_rank_in_its_message_and_the_same_command_goes_on(command: Commands) -> None:
    check = check_of(2)
    run = command(launcher=["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    words = [*WORDS, CHECKED, flip(check.second, "gradient", "recompute")]
    broken = run.run(*words)
    assert broken.code == 1
    assert f"error: step {STEP}: rank {check.second} (host" in broken.output
    resumed = run.run(*words)
    assert resumed.code == 0, resumed.output
    assert check_ledger(run.directory, STEPS).num_lost == 0
