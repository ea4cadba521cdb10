"""What is read back of a ledger, and of events, without reading all of it."""

import math
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from steadfast.plan import End, Plan, Shares
from steadfast.run.directory import STEPS, RunDirectory
from steadfast.run.events import Checkpoint, Rollback, RunStarted, ShortStep
from steadfast.run.ledger import Ledger, PastLosses, StepStats, StepTimes, Totals, last_end, past_losses, read_shares
from steadfast.storage import LocalStore
from steadfast.storage.jsonl import last_lines
from steadfast.telemetry.goodput import goodput, read_totals
from tests.support.history import History, write_ledger

NOW_S = 1.8e9


def test_past_losses_are_those_that_hold_in_the_order_of_steps(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert past_losses(store, 9) == PastLosses()
    losses = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (2, 2.5), (3, None), (4, float("nan")), (5, 5.0), (6, 6.0)]
    write_ledger(store, ({"step": step, "loss": loss} for step, loss in losses))
    assert past_losses(store, 5) == PastLosses([1.0, 2.5, 5.0], [1.0, 2.5, 5.0])
    (tmp_path / "long").mkdir()
    store = LocalStore(tmp_path / "long")  # of which the first and the last ones are read
    write_ledger(store, ({"step": step, "loss": float(step)} for step in range(1, 20_001)))
    past = past_losses(store, 19_990)
    assert past.first[:32] == [float(step) for step in range(1, 33)]
    assert past.recent[-1] == 19_990.0
    assert len(past.first) < 2000
    assert len(past.recent) < 6000


def committed(folder: Path, shares: Shares, num_steps: int = 1) -> RunDirectory:
    """A run of some steps with these shares."""
    directory = RunDirectory(LocalStore(folder))
    ledger = Ledger(directory.store, 1, Plan(sum(shares), 1, shares), writes=True)
    for step in range(1, num_steps + 1):
        stats = StepStats(step, 2.5, sum(shares), 1.0, sum(shares), 2**63, finite=True)
        ledger.commit([(stats, StepTimes(1.0, NOW_S + step))])
    ledger.close()
    return directory


@pytest.mark.parametrize(
    ("shares", "short"),
    [((4,), [4]), ((4, 3), [4, 3]), ((4, 4, 3), [[2, 4], 3]), ((1, 0, 0, 2, 2), [1, [2, 0], [2, 2]])],
)
def test_neighbours_with_equal_shares_are_written_as_one(tmp_path: Path, shares: Shares, short: list[object]) -> None:
    line = committed(tmp_path, shares).last_step_line()
    assert line["shares"] == short
    assert read_shares(line) == list(shares)


@pytest.mark.parametrize("written", [None, 5, "4, 4", [[4]], [None], [[2.0, 1]], [[2**60, 1]]])
def test_shares_that_no_run_has_written_are_not_read(written: object) -> None:
    assert read_shares({"shares": written}) is None
    assert read_shares({"shares": [4, 4, 3]}) == [4, 4, 3]  # of an earlier release


def test_the_last_step_is_found_however_long_its_line_is(tmp_path: Path) -> None:
    (tmp_path / "equal").mkdir()
    committed(tmp_path / "equal", (8,) * 10_000)
    assert (tmp_path / "equal" / STEPS).stat().st_size <= 500
    directory = committed(tmp_path, (8, 9) * 10_000, num_steps=3)
    assert (tmp_path / STEPS).stat().st_size > 3 * 40_000
    assert directory.last_step() == 3
    with (tmp_path / STEPS).open("ab") as file:
        file.write(b'{"step": 4, "shares": [' + 20_000 * b"8,")  # is still being written
    assert directory.last_step() == 3


def test_only_whole_lines_are_among_the_last(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write_ledger(store, ({"number": number} for number in range(100)))
    with (tmp_path / STEPS).open("ab") as file:
        file.write(b'{"number": 1')
    for num_bytes in range(1, 60):
        found = [line["number"] for line in last_lines(store, STEPS, num_bytes)]
        assert found == list(range(100 - len(found), 100))
    assert len(last_lines(store, STEPS)) == 100


def test_amendments_are_those_of_all_rollbacks_and_extensions_once_each(
    directory: RunDirectory,
) -> None:
    assert (directory.amendments().skip, directory.amendments().ends) == (frozenset(), ())
    directory.record(Rollback(steps=(41,), cause="loss nan"))
    directory.record(Checkpoint(step=5, path="step-5", seconds=0.1, blocked_s=0.0, bytes=1))
    directory.record(Rollback(steps=(40, 42), cause="loss nan"))
    for step, position in ((18, 220), (13, 165), (18, 220)):
        directory.record(ShortStep(step=step, position=position))
    assert directory.amendments().skip == {40, 41, 42}
    assert directory.amendments().ends == (End(13, 165), End(18, 220))


# A step of the ledger is (step, samples), and with a third number one that was left out from there on.
LEDGERS: dict[str, tuple[list[tuple[int, ...]], tuple[int, int]]] = {
    "nothing": ([], (0, 0)),
    "whole steps": ([(1, 13), (2, 13)], (2, 26)),
    "a short last step": ([(2, 13), (3, 9)], (3, 35)),
    "one that was done, and not again": ([(2, 13), (3, 9), (2, 13)], (3, 35)),
    "one that was left out": ([(2, 13), (3, 9, 26)], (3, 35)),
    "one that is known": ([(3, 13), (4, 11)], (4, 50)),
    "behind one that is known": ([(4, 11), (5, 13), (6, 9)], (6, 72)),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_where_the_last_step_of_a_ledger_ends(tmp_path: Path, name: str) -> None:
    steps, expected = LEDGERS[name]
    store = LocalStore(tmp_path)
    lines: list[dict[str, Any]] = [{"step": "none"}, {"num_samples": 3}, {"step": 99}, {"step": 99, "positions": [1]}]
    for step, num_samples, *start in steps:
        line: dict[str, Any] = {"step": step, "num_samples": num_samples}
        if start:
            line = {"step": step, "num_samples": 0, "skipped": True, "positions": [start[0], start[0] + num_samples]}
        lines.append(line)
    write_ledger(store, lines)
    assert last_end(store, 13, [End(4, 50)]) == expected


def test_totals_are_those_of_the_lines_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was done again, by whom, and wherever a block ends; and what is no line of ours does no harm."""
    monkeypatch.setattr("steadfast.storage.jsonl._BLOCK_BYTES", 3000)
    monkeypatch.setattr("steadfast.run.ledger._CHUNK", 16)
    draw = random.Random(1)
    for number in range(20):
        monkeypatch.setattr("steadfast.run.ledger._WORTH_AN_IMPORT_BYTES", 0 if number % 2 else 10**9)
        folder = tmp_path / str(number)
        folder.mkdir()
        lines, starts_s = a_course(draw)
        write_ledger(LocalStore(folder), lines)
        with (folder / STEPS).open("ab") as file:
            file.write(b'5\nnull\n{}\n\0\0\n{"step": "x", "attempt": 1}\n{"step": 1e99}\n[1]\n{"step": 3, "atte')
        history = History(lines)
        totals = Totals.read(LocalStore(folder), starts_s)
        committed = history.committed.values()
        assert totals.samples == sum(line["num_samples"] for line in committed)
        assert totals.num_lost == history.num_lost
        assert totals.productive_s == pytest.approx(sum(line["step_s"] for line in committed), rel=1e-6)
        for attempt, span in totals.spans.items():
            own = [line["time_s"] for line in lines if line["attempt"] == attempt]
            assert (span.first_s, span.last_s) == (min(own), max(own))
        assert goodput(totals)["stall_s"] == pytest.approx(stalls(lines, starts_s), abs=1e-3)


def test_a_ledger_is_read_piece_by_piece_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a long run would not fit into memory, and whoever waits for it must see that it is being read."""
    monkeypatch.setattr("steadfast.storage.jsonl._BLOCK_BYTES", 2**15)
    monkeypatch.setattr("steadfast.run.ledger._CHUNK", 2**15)
    num_steps = 30_000
    line = {"attempt": 1, "num_samples": 4, "step_s": 1.0}
    write_ledger(LocalStore(tmp_path), ({**line, "step": n, "time_s": float(n)} for n in range(1, num_steps + 1)))
    size = (tmp_path / STEPS).stat().st_size
    marks: list[int] = []
    tracemalloc.start()
    totals = Totals.read(LocalStore(tmp_path), [], lambda: marks.append(1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert totals.samples == 4 * num_steps
    assert len(marks) >= size // 2**15
    assert peak < size / 2


def a_course(draw: random.Random) -> tuple[list[dict[str, Any]], list[float]]:
    """A ledger with restarts, of which a former leader has written some lines late; and when its commands began."""
    lines: list[dict[str, Any]] = []
    now_s, step, starts_s = 100.0, 0, [99.0]
    for attempt in range(1, draw.randrange(2, 8)):
        if draw.random() < 0.3:
            now_s += 50
            starts_s.append(now_s)
        now_s += draw.random() * 9
        for _ in range(draw.randrange(1, 40)):
            step += 1
            step_s = draw.randrange(1, 100) / 128
            now_s += step_s
            line = {"step": step, "attempt": attempt, "num_samples": draw.choice([13, 13, 0]), "loss": math.nan}
            lines.append({**line, "step_s": step_s, "time_s": now_s})
        step = max(0, step - draw.randrange(0, 20))
    late = draw.randrange(len(lines))
    lines.append(lines.pop(late))
    return lines, starts_s


def stalls(lines: list[dict[str, Any]], starts_s: list[float]) -> float:
    stall_s = 0.0
    for old, new in pairwise(sorted(lines, key=lambda line: line["time_s"])):
        between = any(old["time_s"] < start_s <= new["time_s"] for start_s in starts_s)
        if new["attempt"] != old["attempt"] and not between:
            stall_s += max(0.0, new["time_s"] - new["step_s"] - old["time_s"])
    return stall_s


def test_a_command_lasts_to_the_last_that_is_known_of_it(directory: RunDirectory) -> None:
    directory.record(RunStarted(time_s=100.0, launcher="ray"))
    directory.record(Rollback(time_s=130.0, steps=(41,), cause="loss nan"))
    directory.record(RunStarted(time_s=200.0, launcher="ray"))
    times = [(1, 1, 110.0), (2, 1, 120.0), (2, 2, 220.0), (3, 2, 240.0), (4, 3, 260.0)]
    lines = [{"step": step, "attempt": attempt, "time_s": time_s} for step, attempt, time_s in times]
    write_ledger(directory.store, ({"num_samples": 4, "step_s": 8.0, **line} for line in lines))
    totals = read_totals(directory)
    assert (totals.samples, totals.num_lost) == (16, 1)
    assert goodput(totals) == {"wall_s": 90.0, "stall_s": 12.0, "goodput": round(32 / 90, 4)}
