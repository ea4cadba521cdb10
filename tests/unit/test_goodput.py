"""Where the time of a run went, by what its files say."""

from typing import Any

from steadfast.run.directory import RunDirectory
from steadfast.run.events import AttemptEnded, AttemptStarted, RunStarted, Waiting
from steadfast.telemetry.goodput import TimeLedger, goodput, read_totals
from tests.support.events import attempt_started
from tests.support.run_directories import write_lines


def test_each_second_of_each_rank_is_in_one_category(directory: RunDirectory) -> None:
    """Three workers, of which one is lost; two go on, do a step again, are short of a third, and stop."""
    directory.record(RunStarted(time_s=100.0, launcher="ray"))
    directory.record(started(1, 3, 112.0, step=0, source="start", formed_s=5.0, built_s=2.0, restored_s=1.0))
    write_lines(
        directory, [step(1, 1, 3, 112.0), step(2, 1, 3, 114.0, data_s=0.5), step(3, 1, 3, 119.0, validation_s=2.0)]
    )
    directory.record(AttemptEnded(time_s=122.0, attempt=1, cause="worker lost"))
    directory.record(Waiting(time_s=128.0, workers=2, needed=3, seconds=5.0))
    directory.record(started(2, 2, 140.0, step=1, source="checkpoint", formed_s=10.0, built_s=2.0, restored_s=3.0))
    write_lines(
        directory, [step(2, 2, 2, 140.0), step(3, 2, 2, 142.0, data_s=0.5), step(4, 2, 2, 145.0, snapshot_s=0.25)]
    )
    directory.record(AttemptEnded(time_s=149.0, attempt=2, cause="stopped", checkpoint_s=3.0))
    directory.record(Waiting(time_s=150.0, workers=2, needed=3))

    ledger = TimeLedger(read_totals(directory), directory.all_events())
    first, second = ledger.accounts
    assert positive(first.rank_s) == {
        "start-up": 10 * 3,
        "productive": 2 * 3,  # the first step; the other two were done again
        "redone": 4 * 3,
        "validation": 2 * 3,
        "idle": 1 * 3,  # before the step after the validation
    }
    assert positive(second.rank_s) == {
        "detection": 3 * 3,  # at the cost of the world that failed
        "re-forming": 1 * 2 + 2 * 2 + 1 * 2,  # before the shortage, building, and before the first step
        "waiting for workers": 9 * 2,
        "restore": 3 * 2,
        "data wait": 0.5 * 2,
        "productive": 5.5 * 2,
        "snapshot": 0.25 * 2,
        "checkpoint wait": 3 * 2,
        "idle": (0.75 + 1 + 1) * 2,
    }
    # The world of three lasted from 100 to 122, that of two from there to 150.
    assert sum(ledger.rank_s().values()) == 22 * 3 + 28 * 2


def test_the_time_between_two_commands_is_nobodys(directory: RunDirectory) -> None:
    directory.record(RunStarted(time_s=100.0, launcher="torchrun"))
    write_lines(directory, [step(1, 1, 2, 110.0), step(2, 1, 2, 112.0)])  # killed
    directory.record(RunStarted(time_s=200.0, launcher="torchrun"))
    directory.record(started(2, 2, 210.0, step=1, source="checkpoint", formed_s=1.0, built_s=1.0, restored_s=2.0))
    write_lines(directory, [step(2, 2, 2, 210.0)])
    directory.record(RunStarted(time_s=300.0, launcher="torchrun"))
    directory.record(AttemptEnded(time_s=304.0, cause="exception"))

    ledger = TimeLedger(read_totals(directory), directory.all_events())
    assert [positive(account.seconds) for account in ledger.accounts] == [
        {"start-up": 8, "productive": 2, "redone": 2},
        {"start-up": 6, "restore": 2, "productive": 2},
        {"start-up": 4},
    ]
    assert [(account.began_s, account.ended_s) for account in ledger.accounts] == [(100, 112), (200, 210), (300, 304)]


def test_where_a_command_begins_again_the_gap_is_detection_and_start_up(directory: RunDirectory) -> None:
    directory.record(RunStarted(time_s=100.0, launcher="torchrun"))
    write_lines(directory, [step(1, 1, 2, 110.0), step(2, 1, 2, 112.0)])  # killed
    for again_s in (115.0, 118.0):  # one of them came to no step
        directory.record(RunStarted(time_s=again_s, launcher="torchrun", again=True))
    directory.record(started(2, 2, 130.0, step=1, source="snapshot", formed_s=1.0, built_s=1.0, restored_s=2.0))
    write_lines(directory, [step(2, 2, 2, 130.0)])
    directory.record(RunStarted(time_s=140.0, launcher="torchrun", again=True))

    totals = read_totals(directory)
    ledger = TimeLedger(totals, directory.all_events())
    assert [positive(account.seconds) for account in ledger.accounts] == [
        {"start-up": 8, "productive": 2, "redone": 2},
        {"detection": 3 + 10, "start-up": 11, "restore": 2, "productive": 2},
    ]
    assert sum(ledger.rank_s().values()) == 2 * 40
    assert goodput(totals)["wall_s"] == 40
    assert goodput(totals)["stall_s"] == 16


def started(attempt: int, world_size: int, time_s: float, **fields: Any) -> AttemptStarted:
    # A second between the state's being there and the first step, which takes two.
    return attempt_started(attempt, world_size=world_size, time_s=time_s, first_step_s=3.0, **fields)


def step(number: int, attempt: int, world_size: int, time_s: float, **waits_s: float) -> dict[str, Any]:
    line = {"step": number, "attempt": attempt, "world_size": world_size, "num_samples": 4}
    return {**line, "step_s": 2.0, "time_s": time_s, **waits_s}


def positive(seconds: dict[str, float]) -> dict[str, float]:
    return {category: round(value, 6) for category, value in seconds.items() if value}
