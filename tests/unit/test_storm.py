"""Storms strike everyone alike, and their table tells what each contender has made of them."""

import json
import statistics
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from steadfast.commands.chaos import _seconds
from tests.chaos.contenders import OURS
from tests.chaos.schedules import MIX, Storm, calm, notices, poisson, spot_trace, uniform
from tests.chaos.storm import Outcome, StormRun
from tests.chaos.storm_page import COLUMNS, page, table
from tests.chaos.storm_runs import broken, storms

GOOD = Outcome(
    OURS,
    "Poisson, mean 15 s",
    600,
    wall_s=70.0,
    ettr=0.9,
    stall_s=0.4,
    wasted_steps=1,
    samples_strayed=0,
    difference=0.0,
    equal=True,
    strikes=[(2.0, "hang"), (24.0, "kill worker")],
    progress=[(0.0, 1), (70.0, 600)],
)


def gaps(storm: Storm, count: int = 4000) -> list[float]:
    times = [0.0, *(strike.after_s for strike in islice(storm.strikes(1), count))]
    return [new - old for old, new in pairwise(times)]


@pytest.mark.parametrize("storm", [poisson(15.0, 600), uniform(15.0, 600), notices(15.0, 600)])
def test_a_storm_is_the_same_for_everyone_and_has_its_mean(storm: Storm) -> None:
    assert list(islice(storm.strikes(1), 50)) == list(islice(storm.strikes(1), 50))
    assert statistics.mean(gaps(storm)) == pytest.approx(15.0, rel=0.05)


def test_the_storms_differ_in_how_regular_they_are() -> None:
    assert statistics.stdev(gaps(poisson(15.0, 600))) == pytest.approx(15.0, rel=0.1)
    assert (min(gaps(uniform(15.0, 600))), max(gaps(uniform(15.0, 600)))) == pytest.approx((11.25, 18.75), rel=0.01)
    assert set(gaps(notices(15.0, 600), 20)) == {15.0}
    assert not list(calm(600).strikes(1))
    bursts = gaps(spot_trace(15.0, 600))
    assert statistics.mean(bursts) == pytest.approx(15.0)
    assert min(bursts) < 2.0
    assert max(bursts) > 60.0


def test_faults_come_in_the_shares_of_the_mix_or_each_in_turn() -> None:
    counts = Counter(strike.fault for strike in islice(poisson(15.0, 600).strikes(1), 4000))
    assert {fault: count / 4000 for fault, count in counts.items()} == pytest.approx(MIX, abs=0.03)
    assert [strike.fault for strike in islice(uniform(15.0, 600).strikes(1), 6)] == list(MIX)
    assert {strike.fault for strike in islice(notices(15.0, 600).strikes(1), 6)} == {"drain"}


def test_all_storms_are_scaled_by_one_mean() -> None:
    assert [storm.name for storm in storms(15.0)] == [
        "no faults",
        "Poisson, mean 15 s",
        "notices, every 15 s",
        "each kind in turn, mean 15 s",
        "spot trace, mean 15 s",
        "Poisson, mean 60 s",
        "Poisson, mean 600 s",
    ]


def lines(*steps: tuple[int, float, int, int]) -> list[dict[str, Any]]:
    names = ("step", "time_s", "attempt", "world_size")
    return [dict(zip(names, step, strict=True)) for step in steps]


def storm_run(folder: Path, ledger: list[dict[str, Any]]) -> StormRun:
    (folder / "steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in ledger))
    contender: Any = SimpleNamespace(name="torchrun", folder=folder, start_nodes=2)
    return StormRun(contender, folder / "pace", print)


def test_an_outcome_counts_wasted_steps_and_relates_the_time_to_that_of_undisturbed_steps(tmp_path: Path) -> None:
    ledger = lines((1, 10.0, 1, 2), (2, 11.0, 1, 2), (3, 12.0, 1, 2), (2, 20.0, 2, 1), (3, 22.0, 2, 1), (4, 23.0, 3, 2))
    outcome = storm_run(tmp_path, ledger)._outcome(poisson(15.0, 4), began_s=5.0)
    assert (outcome.executed_steps, outcome.wasted_steps, outcome.num_attempts) == (6, 2, 3)
    assert outcome.mean_step_time_s == 1.0, "of steps with all workers"
    assert (outcome.wall_s, outcome.e2e_time, outcome.worker_s) == (13.0, 18.0, 36.0)
    assert outcome.ettr == pytest.approx(3 / 13)
    assert outcome.wasted_worker_s == 4.0
    assert outcome.resumed_from_steps == [0, 1, 3]


def test_a_line_that_every_group_has_written_is_one_step_and_without_the_last_one_there_is_no_ratio(
    tmp_path: Path,
) -> None:
    ledger = lines((1, 10.0, 1, 2), (1, 10.1, 1, 2), (2, 11.0, 1, 2), (2, 11.1, 1, 2))
    run = storm_run(tmp_path, ledger)
    outcome = run._outcome(poisson(15.0, 2), began_s=5.0)
    assert (outcome.executed_steps, outcome.wasted_steps, outcome.mean_step_time_s) == (2, 0, 1.0)
    outcome = run._outcome(poisson(15.0, 4), began_s=5.0)
    assert (outcome.ettr, outcome.wall_s, outcome.note) == (None, None, "stopped at step 2")
    assert "stopped at step 2" in table([outcome])


def test_a_stall_is_the_longest_wait_for_a_new_step_after_a_fault_that_is_seen_at_once(tmp_path: Path) -> None:
    ledger = lines((1, 10.0, 1, 2), (2, 11.0, 1, 2), (3, 12.0, 1, 2), (3, 14.0, 2, 1), (4, 16.0, 2, 1), (5, 17.0, 2, 2))
    run = storm_run(tmp_path, ledger)
    run._struck = [(12.5, "kill worker"), (16.5, "hang")]
    assert run._stall_s(1.0) == pytest.approx(2.5), "step 3 was done again, which is no progress"
    run._struck = [(12.5, "hang")]
    assert run._stall_s(1.0) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"samples_strayed": 24}, "24 samples lost or used twice"),
        ({"samples_strayed": None}, "None samples lost or used twice"),
        ({"difference": 1e-3}, "weights differ from an undisturbed run by 0.001"),
        ({"difference": None}, "weights differ"),
        ({"equal": False}, "weights have other bits"),
        ({"ettr": None, "note": "stopped at step 9"}, "the last step was not reached; stopped at step 9"),
        ({"wasted_steps": 25}, "25 steps done again after 2 faults, claimed at most 2"),
        ({"stall_s": 1.4}, "a fault stalls for 1.40 s, the median; claimed at most 0.70 s"),
        ({"stall_s": 2.4, "slowdown": 2.0}, "claimed at most 1.40 s"),
    ],
)
def test_a_claim_that_does_not_hold_is_told(change: dict[str, Any], sentence: str) -> None:
    assert not broken([GOOD])
    assert not broken([replace(GOOD, contender="torchrun", **change)]), "others claim nothing"
    assert not broken([replace(GOOD, wasted_steps=26, strikes=[(2.0, "bit flip")])]), "since the newest checkpoint"
    (told,) = broken([replace(GOOD, **change)])
    assert sentence in told
    assert told.startswith("steadfast, Poisson, mean 15 s: ")


def test_the_table_has_each_figure_or_a_reason_and_the_page_a_line_for_each_contender() -> None:
    lines = table([GOOD, replace(GOOD, contender="torchft", wall_s=None, note="torchft is not installed")]).splitlines()
    assert lines[0].split() == ["storm", "contender", *COLUMNS]
    assert lines[2].split()[:2] == ["torchft", "-"]
    assert "torchft, Poisson, mean 15 s: torchft is not installed" in lines
    assert "step_overhead -: measured without faults only" in lines
    facts = {"seed": 1, "machine": "2 cores", "versions": {"torch": "2.13.0"}}
    found = page([GOOD, replace(GOOD, contender="torchrun", strikes=[])], facts)
    assert found.count("<polyline") == 2
    assert found.count("<title>steadfast: ") == 2, "a tick for each fault"
    assert "2 cores; torch 2.13.0; seed 1" in found


@pytest.mark.parametrize(("text", "seconds"), [("15s", 15.0), ("2m", 120.0), ("20", 20.0), ("0.5s", 0.5)])
def test_a_mean_is_given_in_seconds_or_minutes(text: str, seconds: float) -> None:
    assert _seconds(text) == seconds
