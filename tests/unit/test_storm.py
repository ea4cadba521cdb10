"""Storms strike everyone alike, and their table tells what each contender has made of them."""

from __future__ import annotations

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
from tests.chaos.schedules import MIX, Storm, notices, poisson, uniform
from tests.chaos.storm import Outcome, StormRun, broken, table

GOOD = Outcome(OURS, "Poisson, mean 15 s", 600, 70.0, 0.9, 5, 9, 1, 601, 1, 0.2, 0.1, 80.0, 160.0, 0, 1e-16)


def gaps(storm: Storm, count: int = 4000) -> list[float]:
    times = [0.0, *(strike.after_s for strike in islice(storm.strikes(1), count))]
    return [new - old for old, new in pairwise(times)]


@pytest.mark.parametrize("storm", [poisson(15.0), uniform(15.0), notices(15.0)])
def test_a_storm_is_the_same_for_everyone_and_has_its_mean(storm: Storm) -> None:
    assert list(islice(storm.strikes(1), 50)) == list(islice(storm.strikes(1), 50))
    assert statistics.mean(gaps(storm)) == pytest.approx(15.0, rel=0.05)


def test_the_storms_differ_in_how_regular_they_are() -> None:
    assert statistics.stdev(gaps(poisson(15.0))) == pytest.approx(15.0, rel=0.1)
    assert (min(gaps(uniform(15.0))), max(gaps(uniform(15.0)))) == pytest.approx((11.25, 18.75), rel=0.01)
    assert set(gaps(notices(15.0), 20)) == {15.0}


def test_faults_come_in_the_shares_of_the_mix() -> None:
    counts = Counter(strike.fault for strike in islice(poisson(15.0).strikes(1), 4000))
    assert {fault: count / 4000 for fault, count in counts.items()} == pytest.approx(MIX, abs=0.03)


def lines(*steps: tuple[int, float, int, int]) -> list[dict[str, Any]]:
    names = ("step", "time_s", "attempt", "world_size")
    return [dict(zip(names, step, strict=True)) for step in steps]


def storm_run(folder: Path, ledger: list[dict[str, Any]]) -> StormRun:
    (folder / "steps.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in ledger))
    contender: Any = SimpleNamespace(name="torchrun", folder=folder)
    return StormRun(contender, folder / "pace", print)


def test_an_outcome_counts_wasted_steps_and_relates_the_time_to_that_of_undisturbed_steps(tmp_path: Path) -> None:
    ledger = lines((1, 10.0, 1, 2), (2, 11.0, 1, 2), (3, 12.0, 1, 2), (2, 20.0, 2, 1), (3, 22.0, 2, 1), (4, 23.0, 3, 2))
    outcome = storm_run(tmp_path, ledger)._outcome(poisson(15.0), 4, began_s=5.0)
    assert (outcome.executed_steps, outcome.wasted_steps, outcome.num_attempts) == (6, 2, 3)
    assert outcome.mean_step_time_s == 1.0, "of steps with all workers"
    assert (outcome.wall_s, outcome.e2e_time, outcome.worker_s) == (13.0, 18.0, 36.0)
    assert outcome.ettr == pytest.approx(3 / 13)
    assert outcome.wasted_worker_s == 4.0


def test_an_outcome_before_the_last_step_has_no_ratio(tmp_path: Path) -> None:
    outcome = storm_run(tmp_path, lines((1, 10.0, 1, 2), (2, 11.0, 1, 2)))._outcome(poisson(15.0), 4, began_s=5.0)
    assert outcome.ettr is None
    assert outcome.note == "stopped at step 2"
    assert "stopped at step 2" in table([outcome])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"samples_strayed": 24}, "24 samples lost or used twice"),
        ({"difference": 1e-3}, "weights differ from an undisturbed run by 0.001"),
        ({"difference": None}, "weights differ"),
        ({"ettr": None}, "did not reach its last step"),
    ],
)
def test_a_claim_that_does_not_hold_is_told(change: dict[str, Any], sentence: str) -> None:
    assert not broken([GOOD])
    assert not broken([replace(GOOD, contender="torchrun", **change)]), "others claim nothing"
    (told,) = broken([replace(GOOD, **change)])
    assert sentence in told


@pytest.mark.parametrize(("text", "seconds"), [("15s", 15.0), ("2m", 120.0), ("20", 20.0), ("0.5s", 0.5)])
def test_a_mean_is_given_in_seconds_or_minutes(text: str, seconds: float) -> None:
    assert _seconds(text) == seconds
