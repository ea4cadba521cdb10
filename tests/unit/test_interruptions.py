"""What interrupted a run, as status, report and trackers tell it: from one reading of its events."""

from typing import Any

from steadfast.run import events
from steadfast.run.directory import RunDirectory
from steadfast.telemetry.interruptions import Interruption, read_interruptions
from steadfast.telemetry.past import Past


def started(attempt: int, world_size: int, time_s: float, **fields: Any) -> events.AttemptStarted:
    """Eight seconds after the last step the first step of an attempt ends, which took one."""
    parts = {"detected_s": 2.0, "formed_s": 1.0, "built_s": 1.0, "restored_s": 1.0, "first_step_s": 3.0, "step_s": 1.0}
    told = {"step": 9, "source": "snapshot", **parts, **fields}
    return events.AttemptStarted(attempt=attempt, world_size=world_size, time_s=time_s, **told)


COMMAND = events.RunStarted(time_s=1.0, launcher="ray")
FIRST = started(1, 3, 20.0, step=0, source="start")
LOST = events.Failure(time_s=101.5, error="reset\nat line 3", kind="worker", member="m1", node="0123456789")
FAILED = events.AttemptEnded(time_s=102.0, attempt=1, cause="worker lost", step=12)
RESIZED = events.AttemptEnded(time_s=102.0, attempt=1, cause="resized", step=12)
SECOND = started(2, 2, 108.0)


def only(*told: events.Event) -> Interruption:
    (found,) = read_interruptions([COMMAND, FIRST, *told])
    return found


def test_a_failure_has_a_detection_and_a_way_back() -> None:
    restores = [events.Restore(step=step, source="snapshot", lost_steps=lost) for step, lost in ((6, 6), (9, 3))]
    failure = only(LOST, FAILED, *restores, SECOND)
    assert (failure.kind, failure.cause) == ("failure", "loss of worker m1 on node 01234567: reset")
    assert (failure.ended, failure.attempt, failure.workers) == (1, 2, (3, 2))
    assert (failure.time_s, failure.step, failure.source) == (102.0, 9, "snapshot")
    # The last step was at 100, the first one again began at 107; of two tries the one that came to a step has restored.
    assert (failure.detected_s, failure.back_s, failure.lost_steps, failure.lost_s) == (2.0, 5.0, 3, 7.0)
    # Steps that were done again cost time, where the ledger tells.
    (failure,) = read_interruptions([COMMAND, FIRST, LOST, FAILED, SECOND], redone_s={1: 4.0, 2: 50.0})
    assert (failure.redone_s, failure.lost_s) == (4.0, 11.0)
    shrunk = events.ForwardsShrunk(step=13, forward_size=4, error="CUDA out of memory.", rank=2)
    failure = only(shrunk, events.AttemptEnded(time_s=102.0, attempt=1, cause="out of memory", step=12), SECOND)
    assert failure.cause == "out of memory on rank 2: a forward pass now takes at most 4 samples"
    # A failure of which nothing is told is known by the attempt that follows.
    failure = only(SECOND)
    assert (failure.kind, failure.time_s, failure.detected_s, failure.back_s) == ("failure", 100.0, 0.0, 7.0)
    assert only(FAILED, SECOND).cause == "worker lost"
    for time_s in (101.0, 107.5):  # nothing takes less than no time
        assert only(events.AttemptEnded(time_s=time_s, attempt=1, cause="worker lost"), SECOND).lost_s >= 7.0


def test_an_agreed_change_has_no_detection_and_failures_that_changed_nothing_are_not_its_cause() -> None:
    resize = only(LOST, RESIZED, SECOND)
    assert (resize.kind, resize.cause, resize.detected_s, resize.back_s) == ("resize", "a worker left", None, 5.0)
    assert only(RESIZED, started(2, 4, 108.0)).cause == "a worker joined"
    going = events.Preemption(node="0123456789", deadline_s=0, members=("m1",))
    assert resize.time_s == 102.0
    assert only(LOST, going, RESIZED, SECOND).cause == "node 01234567 is preempted with 1 worker"


def test_the_time_between_two_commands_counts_for_nobody() -> None:
    commands = [events.RunStarted(time_s=time_s, launcher="ray") for time_s in (50.0, 101.0)]
    restart = only(LOST, *commands, SECOND)
    assert (restart.kind, restart.detected_s, restart.back_s) == ("restart", None, 6.0)
    assert restart.causes == ("loss of worker m1 on node 01234567: reset", AGAIN)
    for end in (events.AttemptEnded(cause="stopped"), events.Failure(error="a bug", fatal=True)):
        assert only(end, commands[1], SECOND).causes[-1] == "the command was run again"


def test_where_the_same_command_begins_again_its_gap_is_detection_and_start_up() -> None:
    again = [events.RunStarted(time_s=time_s, launcher="torchrun", again=True) for time_s in (103.0, 105.0)]
    failure = only(*again, SECOND)
    assert (failure.kind, failure.detected_s, failure.back_s) == ("failure", 3.0, 4.0)
    assert failure.causes == ("torchrun has restarted its ranks",)
    died = events.ProcessRestarted(process="raylet", follows="the command starts again")
    assert (
        only(died, events.RunStarted(launcher="ray", again=True), SECOND).cause
        == "raylet has died; the command restarted"
    )


def test_what_is_not_over_has_no_end_yet_and_a_spare_that_fails_interrupts_nothing() -> None:
    (pending,) = read_interruptions([COMMAND, FIRST, LOST, FAILED])
    assert (pending.kind, pending.ended, pending.attempt, pending.back_s) == ("failure", 1, None, None)
    (of_torchrun,) = read_interruptions([COMMAND, FIRST, events.Failure(time_s=101.0, error="closed by peer\nat x")])
    assert (of_torchrun.time_s, of_torchrun.cause) == (101.0, "closed by peer")
    bug = events.Failure(time_s=101.0, kind="exception", rank=1, pid=7, host="h", error="ValueError: bug\nat x")
    (of_rank,) = read_interruptions([COMMAND, FIRST, bug])
    assert of_rank.cause == "rank 1 (pid 7 on h) raised ValueError: bug"
    assert only(events.RunStarted(time_s=200.0, launcher="ray")).kind == "restart"
    assert read_interruptions([COMMAND, FIRST, LOST]) == []
    assert read_interruptions([COMMAND, LOST, FAILED]) == []
    assert read_interruptions([COMMAND, FIRST, events.AttemptEnded(cause="finished")]) == []


def test_trackers_mark_the_same_interruptions(directory: RunDirectory) -> None:
    resized = events.AttemptEnded(time_s=110.0, attempt=2, cause="resized", step=20)
    for event in (COMMAND, FIRST, LOST, LOST, FAILED, SECOND, LOST, resized):
        directory.record(event)
    past = Past.read(directory)
    assert (past.num_failures, past.num_resizes, past.num_restarts) == (1, 1, 0)
    directory.record(events.RunStarted(time_s=120.0, launcher="ray"))
    causes = (f"restart: {only(LOST, FAILED).cause}", f"restart: {AGAIN}")
    assert Past.read(directory) == Past(1, 0, 1, causes, num_workers=SECOND.world_size, kind="restart")


def test_the_past_forgets_validations_of_steps_that_a_rollback_has_taken_back(directory: RunDirectory) -> None:
    for step in (3, 6, 9):
        directory.record(events.Validation(step=step, metrics={"loss": 1.0}))
    directory.record(events.Rollback(steps=(6,), cause="the loss is nan"))
    directory.record(events.Validation(step=9, metrics={"loss": 2.0}))
    assert Past.read(directory).validations == {3: {"loss": 1.0}, 9: {"loss": 2.0}}


def test_the_past_knows_the_newest_checkpoint_and_where_the_last_attempt_trained(directory: RunDirectory) -> None:
    directory.record(events.Checkpoint(step=30, path="", seconds=0.0, blocked_s=0.0, bytes=0))
    directory.record(started(1, 2, 20.0, nodes={"a": (0,), "b": (1,)}))
    past = Past.read(directory)
    assert (past.committed, past.num_nodes, past.num_workers, past.kind) == (30, 2, 2, None)
    directory.record(events.Validation(step=30, metrics={"loss": 2.0}))
    directory.record(events.AttemptEnded(attempt=1, step=40, cause="resized"))
    past = Past.read(directory)
    assert (past.kind, past.validations) == ("resize", {30: {"loss": 2.0}})


AGAIN = "the command ended without a report, and was run again"
