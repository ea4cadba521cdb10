"""What `chaos` makes of the lines that contenders wrote."""

import time
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.matrix import CLAIMS, FAULTS
from tests.chaos.report import Row, broken, measure, only_stalls, strayed, table
from tests.chaos.yardstick import Yardstick

NAMES = [fault.name for fault in FAULTS]
PROVEN = [Row(name, "ours", 0, 0, 0.1, True, True) for name in NAMES]
RIVAL = Row("kill worker", "theirs", 20, 0, 4.0, True, True)


def lines(*steps: int, first_s: float = 0.0, every_s: float = 0.1, **fields: Any) -> list[dict[str, Any]]:
    return [{"step": step, "time_s": first_s + every_s * i, **fields} for i, step in enumerate(steps)]


@pytest.mark.parametrize(
    ("ran", "until_s", "redone", "stall_s"),
    [
        ([*lines(1, 2, 3, 4), *lines(3, 4, first_s=5.0), *lines(5, 6, 7, first_s=5.2)], 6.0, 2, 4.75),  # a restart
        # What happens outside of the window is another fault's.
        ([*lines(1, 2, 3, 4), *lines(4, 5, 6, first_s=2.0), *lines(6, 7, first_s=9.0)], 3.0, 1, 1.65),
        ([*lines(1, 2, 3, 4, 5, 6), *lines(7, 8, first_s=1.5)], 2.0, 0, 0.9),  # a pause later than the fault
        # A step that was only written down after the fault is no progress.
        ([*lines(1, 2, 3), *lines(4, first_s=1.0, confirmed=False), *lines(5, first_s=1.5)], 2.0, 0, 1.05),
        (lines(1, 2, 3), 2.35, 0, 1.9),  # no step at all is a stall to the end
    ],
)
def test_a_fault_costs_steps_and_the_longest_time_without_a_new_one(
    ran: list[dict[str, Any]], until_s: float, redone: int, stall_s: float
) -> None:
    assert measure(ran, 0.35, until_s) == (redone, pytest.approx(stall_s))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({1: [1, 2], 2: [3, 4]}, 0),
        ({1: [2, 1], 2: [4, 3]}, 0),  # order within the run is the ledger's business
        ({1: [1, 2], 2: [3]}, 1),
        ({1: [1, 2], 2: [1, 2]}, 4),  # two lost, two twice
        ({1: [1, 2]}, 2),
    ],
)
def test_samples_lost_or_used_twice(seen: dict[int, list[int]], expected: int) -> None:
    planned: dict[int, dict[str, Any]] = {1: {"ids": [1, 2]}, 2: {"ids": [3, 4]}}
    assert strayed({step: {"ids": ids} for step, ids in seen.items()}, planned, 2) == expected
    # A step with another digest is wrong as a whole.
    planned = {step: {"step": step, "samples_digest": f"{step}", "num_samples": 8} for step in (1, 2)}
    assert strayed(planned, planned, 2) == 0
    assert strayed({**planned, 2: {**planned[2], "samples_digest": "1"}}, planned, 2) == 16


@pytest.mark.parametrize("fault", NAMES)
@pytest.mark.parametrize(
    ("worse", "said"),
    [
        ({"redone": 31}, "steps redone 31"),
        ({"redone": None}, "steps redone -"),
        ({"strayed": 1}, "samples lost or twice 1"),
        ({"stall_s": 7.0}, "stall 7.00 s"),
        ({"equal": False}, "not equal"),
        ({"equal": None}, "not equal"),
        ({"finished": False}, "did not finish"),
    ],
)
def test_each_claim_breaks_by_itself(fault: str, worse: dict[str, Any], said: str) -> None:
    rows = [replace(row, **worse) if row.fault == fault else row for row in PROVEN]
    found = broken([*rows, RIVAL], CLAIMS, "ours", "theirs")
    if fault in ("kill all", "kill last holder", "kill node") and "stall_s" in worse:
        assert found == []  # starting processes takes what it takes
    else:
        assert len(found) == 1
        assert found[0].startswith(f"{fault}: ")
        assert said in found[0]


def test_a_limit_in_seconds_is_stretched_on_a_busy_machine_and_a_share_is_not() -> None:
    proven = [replace(row, slowdown=3.0) for row in PROVEN]
    rows = [replace(row, stall_s={"grow": 1.4, "kill worker": 0.55}.get(row.fault, 0.1)) for row in proven]
    assert broken([*rows, RIVAL], CLAIMS, "ours", "theirs") == []
    rows = [replace(row, stall_s={"grow": 1.6, "kill worker": 0.65}.get(row.fault, 0.1)) for row in proven]
    assert broken([*rows, RIVAL], CLAIMS, "ours", "theirs") == [
        "kill worker: stall 0.65 s, claimed at most 0.60 s",
        "grow: stall 1.60 s, claimed at most 1.50 s (0.50 s on a machine that is not 3.0 times as slow as alone)",
    ]


def test_of_two_tries_the_better_one_counts_and_both_are_shown() -> None:
    again = [replace(row, former_s=0.51) if row.fault == "grow" else row for row in PROVEN]
    assert broken([*again, RIVAL], CLAIMS, "ours", "theirs") == []
    assert "0.51 and again 0.10" in table(again, NAMES)
    worse = [replace(row, stall_s=0.6, former_s=0.51) if row.fault == "grow" else row for row in PROVEN]
    (found,) = broken([*worse, RIVAL], CLAIMS, "ours", "theirs")
    assert found == "grow: stall 0.51 and again 0.60 s, claimed at most 0.50 s"


@pytest.mark.parametrize(
    ("worse", "expected"),
    [({}, False), ({"stall_s": 7.0}, True), ({"stall_s": 7.0, "redone": 1}, False), ({"redone": 1}, False)],
)
def test_only_a_stall_is_worth_another_try(worse: dict[str, Any], expected: bool) -> None:
    rows = [replace(row, **worse) if row.fault == "grow" else row for row in PROVEN]
    assert only_stalls(broken([*rows, RIVAL], CLAIMS, "ours", "theirs")) is expected


def test_the_yardstick_is_one_on_a_quiet_machine_and_more_on_a_busy_one() -> None:
    began = time.time()
    with Yardstick() as yardstick:
        time.sleep(0.5)
    assert 1.0 <= yardstick.slowdown(began, time.time()) <= 10.0
    assert yardstick.slowdown(0.0, 1.0) == 1.0
    yardstick._takes = [(5.0, 0.45, 0.15), (6.0, 0.75, 0.15), (50.0, 9.0, 0.15)]
    assert yardstick.slowdown(4.0, 7.0) == pytest.approx(4.0)
    assert yardstick.slowdown(49.0, 51.0) == 10.0


def test_a_claim_that_was_not_measured_does_not_hold() -> None:
    assert {sentence.split(":")[0] for sentence in broken([], CLAIMS, "ours", "theirs")} == set(NAMES)
    assert broken(PROVEN, CLAIMS, "ours", "theirs") == ["kill worker: stall 0.10 s, claimed at most nan s"]
    # A rival that a fault ends is no yardstick that can be missed.
    ended = replace(RIVAL, stall_s=None, finished=False)
    assert broken([*PROVEN, ended], CLAIMS, "ours", "theirs") == []


def test_the_table_puts_contenders_side_by_side() -> None:
    rows = [Row("grow", "ours", 0, 0, 0.123, True, True), Row("grow", "theirs", finished=False), PROVEN[0], RIVAL]
    assert table(rows, NAMES).splitlines() == [
        "fault        contender  steps redone  samples lost or twice  stall, s  equal?  finished?",
        "kill worker  ours       0             0                      0.10      yes     yes",
        "             theirs     20            0                      4.00      yes     yes",
        "grow         ours       0             0                      0.12      yes     yes",
        "             theirs     -             -                      -         -       no",
    ]
