"""A worker that computes wrongly or runs out of memory, under Ray and under torchrun: the result is the right one."""

import pytest

from steadfast.config import BatchConfig, RunConfig
from steadfast.guards.corruption import Check, choose
from steadfast.plan import Plan, even_shares
from tests.support.bed import Bed
from tests.support.checks import check_finished, check_identical, check_ledger, differences, summary_of
from tests.support.command import STANDALONE, Commands

pytestmark = pytest.mark.timeout(300)

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
        finished = check_finished(running, 200)
        check_finished(command("undisturbed").start(*on_bed), 200)
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


def test_torchrun_ends_with_the_rank_in_its_message_and_the_same_command_goes_on(command: Commands) -> None:
    check = check_of(2)
    run = command(launcher=STANDALONE)
    words = [*WORDS, CHECKED, flip(check.second, "gradient", "recompute")]
    broken = run.run(*words)
    assert broken.code == 1
    assert f"error: step {STEP}: rank {check.second} (host" in broken.output
    check_finished(run.start(*words))
    assert check_ledger(run.directory, STEPS).num_lost == 0


# Of forwards that run out of memory. A microbatch is of eight samples.
FORWARDS = ["run.steps=150", "model.dropout=0", "precision.kind=fp64", "checkpoint.every=20 steps"]
OOM = "{kind: oom_at, step: 50, rank: 1, times: 2}"
SLOW = "{kind: slow_at, ranks: [0, 1], ms: 10}"  # or the steps that are left may be over before a look at who does them


@pytest.mark.ray
@pytest.mark.slow
def test_nobody_is_replaced_and_no_step_is_done_again(on_head: Commands, command: Commands) -> None:
    undisturbed = command("undisturbed", launcher=STANDALONE)
    assert undisturbed.run(*FORWARDS).code == 0
    run = on_head("run")
    running = run.start(*FORWARDS, f"faults.inject=[{OOM}, {SLOW}]", "scaling.num_workers=2")
    running.wait_for_event("attempt_started", attempt=1, world_size=2, timeout_s=150)
    pids = running.worker_pids()
    running.wait_for_event("attempt_started", attempt=3, world_size=2)
    assert running.worker_pids() == pids
    finished = check_finished(running)
    assert "out of memory in step 50: from now on forwards have at most 4 samples" in finished.output
    shrunk = [event["forward_size"] for event in running.events if event["event"] == "forwards_shrunk"]
    assert shrunk == [4, 2]
    assert [event for event in running.events if event["event"] == "failure"] == []
    assert check_ledger(run.directory, 150).num_lost == 0
    assert max(float(each.abs().max()) for each in differences(run.directory, undisturbed.directory)) <= 1e-10


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again(command: Commands) -> None:
    undisturbed = command("undisturbed", launcher=STANDALONE)
    assert undisturbed.run(*FORWARDS).code == 0
    run = command("run", launcher=[*STANDALONE, "--max-restarts", "2"])
    check_finished(run.start(*FORWARDS, f"faults.inject=[{OOM}]"))
    assert summary_of(run.directory)["attempts"] == 3
    check_ledger(run.directory, 150)
    assert max(float(each.abs().max()) for each in differences(run.directory, undisturbed.directory)) <= 1e-10
