"""Workers are lost, fall silent, come and go on one machine; those that live keep running."""

import json
import os
import pickle
import signal

import psutil
import pytest

from tests.support.checks import check_stopped, summary_of
from tests.support.command import FOR_EVER, Commands, Running, is_alive, scale
from tests.support.programs import run_program

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def test_a_survivor_keeps_running_and_the_worker_that_replaces_the_killed_one_joins_it(on_head: Commands) -> None:
    running = on_head().start(FOR_EVER, "scaling.num_workers=[1,2]")
    running.wait_for_event("attempt_started", attempt=1, world_size=2)
    running.wait_for_step(30)
    killed, survivor = running.worker_pids()
    os.kill(killed, signal.SIGKILL)
    running.wait_for_event("attempt_started", attempt=2, world_size=1, source="rank 0")
    running.wait_for_event("attempt_started", attempt=3, world_size=2, source="rank 0")
    assert is_alive(survivor)
    running.wait_for_step(running.history.last_step + 30)
    check_stopped(running, lost_steps=0)
    unconfirmed = [line["step"] for line in running.history.lines if line.get("confirmed") is False]
    assert len(unconfirmed) <= 10  # the steps whose words were under way
    assert running.history.lines[-1]["world_size"] == 2


@pytest.mark.slow
def test_a_silent_worker_is_missed_killed_and_replaced(on_head: Commands) -> None:
    running = on_head().start(FOR_EVER, "scaling.num_workers=[1,2]", "recovery={silence_s: 3, hang_limit_s: 3}")
    running.wait_for_event("attempt_started", attempt=1, world_size=2)
    silent, _ = running.worker_pids()
    os.kill(silent, signal.SIGSTOP)
    assert running.wait_for_event("failure")["error"].startswith("not heard of for ")
    running.wait_for_event("attempt_started", attempt=2, world_size=1, source="rank 0")
    running.wait_until(lambda: not is_alive(silent), "death of the silent worker")
    running.wait_for_event("attempt_started", attempt=3, world_size=2, source="rank 0")
    check_stopped(running)


@pytest.mark.slow
def test_when_all_workers_are_killed_new_ones_go_on_from_the_newest_checkpoint(on_head: Commands) -> None:
    words = ("scaling.num_workers=2", "checkpoint.every=50 steps", "checkpoint.node_memory=false")
    # Losses at the same moment are one failure.
    running = on_head().start(FOR_EVER, *words, "recovery.max_failures=1")
    running.wait_for_step(60)
    for pid in running.worker_pids():
        os.kill(pid, signal.SIGKILL)
    restored = running.wait_for_event("restore", source="checkpoint")
    assert restored["lost_steps"] <= 50
    running.wait_until(lambda: running.history.lines[-1]["step"] > restored["step"] + restored["lost_steps"], "news")
    check_stopped(running, restored["lost_steps"])
    assert running.history.num_lost == restored["lost_steps"]


def test_survivors_of_a_sharded_world_keep_running_and_take_the_newest_copy_or_checkpoint(
    on_head: Commands,
) -> None:
    words = ("parallel.kind=fsdp", "checkpoint.every=20 steps", "logging.every_steps=20")
    running = on_head().start(FOR_EVER, "scaling.num_workers=[1,2]", *words)
    running.wait_for_event("attempt_started", attempt=1, world_size=2)
    running.wait_for_step(50)
    killed, survivor = running.worker_pids()
    os.kill(killed, signal.SIGKILL)
    restored = running.wait_for_event("restore", attempt=2)
    assert restored["source"] in ("snapshot", "checkpoint")
    committed = [event["step"] for event in running.events if event["event"] == "checkpoint" and event["attempt"] == 1]
    assert restored["step"] >= max(committed)
    running.wait_for_event("attempt_started", attempt=3, world_size=2)
    assert is_alive(survivor)
    redone = restored["step"] + restored["lost_steps"]
    running.wait_until(lambda: running.history.lines[-1]["step"] > redone, "the steps that were lost")
    check_stopped(running, lost_steps=20)


def test_scale_changes_the_number_of_workers_of_a_run_that_is_under_way(on_head: Commands) -> None:
    run = on_head()
    assert scale(run.directory, "1:2").returncode == 2  # it is not there yet
    running = run.start(FOR_EVER, "scaling.num_workers=1")
    running.wait_for_step(20)
    (first,) = running.worker_pids()
    grown = running.scale("2:2")
    assert (grown.returncode, grown.stdout.strip().split(": ")[1]) == (0, "[1, 1] -> [2, 2]")
    running.wait_for_event("attempt_started", attempt=2, world_size=2, source="rank 0")
    assert running.scale("1").returncode == 0
    running.wait_for_event("attempt_started", attempt=3, world_size=1, source="rank 0")
    running.wait_until(lambda: running.worker_pids() == [first], "end of the second worker")
    useless = running.scale("2:7")
    assert useless.returncode == 2
    assert "a global batch" in useless.stderr
    assert "is 6 microbatches (batch.global_size 48, batch.microbatch_size 8)" in useless.stderr
    check_stopped(running)
    refused = running.scale("2:1")
    assert (refused.returncode, refused.stderr.strip()) == (
        2,
        "error: --workers 2:1: must be MIN:MAX with 1 <= MIN <= MAX, for example 2:8",
    )


def test_ctrl_c_between_two_worlds_writes_what_the_survivor_holds(on_head: Commands) -> None:
    running = on_head().start(FOR_EVER, "scaling.num_workers=2")  # so that one alone waits
    running.wait_for_step(30)
    os.kill(running.worker_pids()[-1], signal.SIGKILL)
    running.wait_for_event("failure")
    known = running.history.last_step
    check_stopped(running, lost_steps=0)
    summary = summary_of(running.directory)
    assert summary["status"] == "stopped"
    assert running.history.last_step == summary["step"] >= known
    assert summary["last_checkpoint"].endswith(f"{summary['step']:08d}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "phase",
    ["collective", *(pytest.param(each, marks=pytest.mark.slow) for each in ("loader", "forward", "checkpoint"))],
)
def test_a_worker_that_hangs_is_named_and_replaced_and_the_others_go_on(on_head: Commands, phase: str) -> None:
    hang = f"faults.inject=[{{kind: hang_at, step: 60, rank: 1, phase: {phase}}}]"
    words = (FOR_EVER, "scaling.num_workers=[1,2]", "checkpoint.every=25 steps", "recovery.hang_limit_s=3")
    running = on_head().start(*words, hang)
    running.wait_for_step(1, timeout_s=150)  # on a busy machine a start takes as long as all that follows
    found = running.wait_for_event("hang")
    assert (found["ranks"], found["phase"]) == ([1], phase)
    assert running.wait_for_event("failure", kind="hang")["error"].startswith(f"hung in {phase} for ")
    running.wait_for_event("attempt_started", attempt=2, world_size=1, source="rank 0")
    running.wait_for_event("attempt_started", attempt=3, world_size=2, source="rank 0")
    folder = running.directory / "stacks"
    assert "inject.py" in "".join(path.read_text() for path in folder.glob("*.txt"))
    records = {path.name: pickle.loads(path.read_bytes()) for path in (folder / "attempt-1-collectives").iterdir()}
    assert records.keys() == {"rank-0", "rank-1"}
    assert all(record["entries"] for record in records.values())
    check_stopped(running)


def test_a_step_that_is_not_finite_is_rolled_back_and_left_out_by_living_workers(on_head: Commands) -> None:
    faults = "faults.inject=[{kind: nan_at, step: 60, rank: 1}]"
    running = on_head().start(FOR_EVER, "scaling.num_workers=2", "checkpoint.every=25 steps", faults)
    assert running.wait_for_event("rollback")["steps"] == [60]
    pids = running.worker_pids()
    restored = running.wait_for_event("restore")
    assert restored["source"] == "snapshot" or restored["step"] == 50
    assert 50 <= restored["step"] < 60
    running.wait_for_step(100)
    assert running.worker_pids() == pids
    assert [line["step"] for line in running.history.committed.values() if line.get("skipped")] == [60]
    check_stopped(running, lost_steps=60)


def test_one_exception_is_survived_by_the_others_and_the_same_again_ends_the_run(on_head: Commands) -> None:
    faults = "faults.inject=[{kind: fail_at, step: 60, rank: 1}, {kind: fail_at, step: 90, rank: 0, times: null}]"
    running = on_head().start(FOR_EVER, "scaling.num_workers=2", "checkpoint.every=25 steps", faults)
    running.wait_for_event("failure", kind="exception", step=59, fatal=False)
    running.wait_for_event("attempt_started", attempt=2, world_size=2, source="rank 0")
    finished = running.wait()
    assert finished.code == 1
    assert "InjectedFault: injected at step 90" in finished.output
    assert "inject.py" in finished.output
    fatal = [(e["step"], e["fatal"]) for e in running.events if e["event"] == "failure" and e["kind"] == "exception"]
    assert fatal == [(59, False), (89, False), (89, True)]


@pytest.mark.slow
def test_an_exception_that_ends_the_run_loses_no_finished_step_of_sharded_workers(on_head: Commands) -> None:
    faults = "faults.inject=[{kind: fail_at, step: 60, rank: 1, times: null}]"
    words = ("parallel.kind=fsdp", "checkpoint.every=1000 steps")
    running = on_head().start(FOR_EVER, "scaling.num_workers=2", *words, faults)
    assert running.wait().code == 1
    assert [event["step"] for event in running.events if event["event"] == "checkpoint"] == [59]
    assert [event for event in running.events if event["event"] == "not_saved"] == []


def test_a_spare_takes_the_place_of_the_only_worker_before_another_one_has_started(on_head: Commands) -> None:
    words = ("scaling.num_workers=1", "scaling.spares=1", "checkpoint.every=10 steps", "checkpoint.node_memory=false")
    running = on_head().start(FOR_EVER, *words)
    running.wait_for_event("attempt_started", attempt=1, world_size=1, timeout_s=150)
    running.wait_until(lambda: len(running.worker_pids()) == 2, "a spare")
    killed, spare = trainer_and_spare(running)
    assert [event["event"] for event in running.events if event["event"] == "attempt_ended"] == []
    os.kill(killed, signal.SIGKILL)
    running.wait_for_event("failure")
    running.wait_for_event("attempt_started", attempt=2, world_size=1, source="checkpoint")
    running.wait_until(lambda: len(running.worker_pids()) == 2, "another spare")
    assert trainer_and_spare(running)[0] == spare
    check_stopped(running, lost_steps=30)


def trainer_and_spare(running: Running) -> tuple[int, int]:
    """Wait until one of two workers has built its model and waits, and the other trains. Return their pids."""

    def used_s() -> dict[int, float]:
        found = {pid: psutil.Process(pid).cpu_times() for pid in running.worker_pids()}
        return {pid: times.user + times.system for pid, times in found.items()}

    used: list[tuple[float, int]] = []

    def one_waits() -> bool:
        before = used_s()
        running.wait_for_step(running.history.last_step + 30)
        used[:] = sorted((after_s - before.get(pid, 0.0), pid) for pid, after_s in used_s().items())
        return len(used) == 2 and used[0][0] < 0.2 * used[1][0]

    running.wait_until(one_waits, "a worker that waits beside one that trains")
    return used[1][1], used[0][1]


def test_1001_workers_ask_for_their_places_and_the_driver_is_answered_meanwhile() -> None:
    found = json.loads(run_program("-m", "tests.cluster.many_asks", 1001, timeout_s=170).splitlines()[-1])
    assert found["answered"] == 1001
    assert found["all_s"] < 60
    assert found["events_s"] < 5
