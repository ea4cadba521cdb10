"""What `status` says of runs: of those that run, have ended, or were killed."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadfast.analysis.status import state_of
from steadfast.cli import main
from steadfast.run import events
from steadfast.run.interrupts import EXIT_STOPPED
from steadfast.run.owner import read_owner
from steadfast.run.watching import Worker, pop_mark, write_workers
from tests.support.events import changed
from tests.support.json_tables import check_document
from tests.support.run_directories import ENDED, FIRST, LOST, NOW_S, SECOND, run_at, started

Status = Callable[..., str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Status:
    """What the verb prints, given these words."""
    monkeypatch.setattr("steadfast.commands.status._WORKERS_S", 0.0)

    def show(*words: object, code: int = 0, verb: str = "status") -> str:
        assert main(0.0, [verb, *map(str, words)]) == code
        return capsys.readouterr().out

    return show


@pytest.fixture
def status(printed: Status) -> Status:
    """The same, with a single space between two words."""
    return lambda *words, code=0: " ".join(printed(*words, code=code).split())


def press_ctrl_c(_: float) -> None:
    raise KeyboardInterrupt


def test_a_live_run_tells_its_progress_its_figures_and_what_failures_cost(tmp_path: Path, status: Status) -> None:
    run_at(tmp_path, os.getpid(), started(), FIRST, LOST, ENDED, SECOND)
    shown = status(tmp_path)
    assert f"running on {os.uname().nodename}, pid {os.getpid()} | attempt 2" in shown
    assert re.search(r"step 100/400 25% \| last step \d+[sm] ago \| eta 10m", shown)
    assert "training loss 2.500 at step 100 | gradient norm 1.000 " in shown
    assert "39.8k tok/s | 20 ms a step" in shown
    assert "loss of worker m1 on node 01234567: reset | 3 -> 2 workers | detected in 1.0 s | back in 1.0 s" in shown
    assert "steps to repeat if lost: a worker 0 | all but storage 40" in shown
    assert "2 workers | 1 node" in shown
    assert "aaaaaaaa ranks 0-1" in shown


HANG = events.Hang(attempt=2, ranks=(1,), phase="forward", step=100, seconds=3.0, stacks="s", time_s=NOW_S)


def test_progress_names_the_ranks_that_are_stuck_until_they_continue(tmp_path: Path, status: Status) -> None:
    directory = run_at(tmp_path, os.getpid(), started(), FIRST, SECOND, HANG)
    assert "ago | rank 1 stuck in forward training" in status(tmp_path)
    directory.record(events.HangOver(attempt=2, ranks=(1,), phase="forward", step=100, seconds=9.0))
    assert "ago | eta 10m training" in status(tmp_path)


def test_one_reading_names_the_pids_of_workers(tmp_path: Path, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_at(tmp_path, os.getpid(), started(), FIRST, SECOND)

    def write_if_asked(_: float) -> None:
        assert pop_mark(directory.store)
        worker = Worker(rank=1, name="m1", node="0123", step=100, phase="forward", phase_s=0.1, host="vm", pid=4711)
        write_workers(directory.store, 2, [worker])

    monkeypatch.setattr("steadfast.commands.status.sleep", write_if_asked)
    monkeypatch.setattr("steadfast.commands.status._WORKERS_S", 2.0)
    assert "rank 1 (pid 4711) forward" in status(tmp_path)


def test_watch_refreshes_the_page_until_ctrl_c(tmp_path: Path, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_at(tmp_path, os.getpid(), started(), FIRST)

    def finish_and_press_ctrl_c(_: float) -> None:
        if directory.summary():
            press_ctrl_c(0.0)
        directory.write_summary({"status": "finished", "step": 100, "metrics": {}})

    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes the captured output for a terminal
    monkeypatch.setattr("steadfast.commands.status.sleep", finish_and_press_ctrl_c)
    shown = status(tmp_path, "--watch", code=EXIT_STOPPED)
    assert 0 < shown.index(f"running on {os.uname().nodename}") < shown.index(f"finished on {os.uname().nodename}")


def test_watch_requests_phases_of_workers(tmp_path: Path, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = run_at(tmp_path, os.getpid(), started(), FIRST, SECOND)
    phases = (("forward", 0.1), ("forward", 0.2), ("loader", 7.0))
    workers = [
        Worker(rank=rank, name=f"m{rank}", node="a" * 56, step=100, phase=phase, phase_s=phase_s)
        for rank, (phase, phase_s) in enumerate(phases)
    ]
    write_workers(directory.store, 2, workers)
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes the captured output for a terminal
    monkeypatch.setattr("steadfast.commands.status.sleep", press_ctrl_c)
    for option in ("--watch", "--live"):
        shown = status(tmp_path, option, code=EXIT_STOPPED)
        assert "aaaaaaaa ranks 0-1 forward | rank 2 loader for 7s" in shown
        assert ("live page http://127.0.0.1:" in shown) == (option == "--live")
        assert pop_mark(directory.store)


def test_nodes_are_shown_with_their_ranks_gpus_and_what_a_step_costs_each(tmp_path: Path, status: Status) -> None:
    nodes = {"b" * 56: (0, 1, 3), "c" * 56: (2,)}
    gpus = ("NVIDIA H200", "NVIDIA H200", "NVIDIA L4", "NVIDIA H200")
    begun = changed(SECOND, world_size=4, nodes=nodes, gpus=gpus)
    of_another = events.RankTimes(attempt=1, step=5, num_steps=5, own_ms=(1.0, 1.0, 1.0), last=(1, 0, 0))
    times = events.RankTimes(attempt=2, step=99, num_steps=9, own_ms=(10.0, 11.0, 30.0, 10.5), last=(0, 1, 9, 0))
    run_at(tmp_path, os.getpid(), started(), FIRST, of_another, LOST, ENDED, begun)
    assert "bbbbbbbb ranks 0-1, 3 | 3 x NVIDIA H200 cccccccc rank 2 | 1 x NVIDIA L4" in status(tmp_path)
    run_at(tmp_path, os.getpid(), times)
    shown = status(tmp_path)
    assert "3 x NVIDIA H200 | own times 10.00 to 11.00 ms a step | rank 1 is last in 10% of the checks" in shown
    assert "1 x NVIDIA L4 | own time 30.00 ms a step | rank 2 is last in 90% of the checks" in shown
    found = json.loads(status(tmp_path, "--json"))
    check_document("`status` of one run", found)
    (_, slow) = found["nodes"]
    assert slow == {"node": "c" * 56, "ranks": [2], "gpus": ["NVIDIA L4"], "own_ms": [30.0], "last": [0.9]}


def test_for_scripts_it_is_one_object_and_all_runs_are_a_list(tmp_path: Path, printed: Status) -> None:
    run_at(tmp_path / "one", os.getpid(), started(), FIRST)
    run_at(tmp_path / "two", 2**30, started(), FIRST)
    found: dict[str, Any] = json.loads(printed(tmp_path / "one", "--json"))
    assert (found["state"], found["step"], found["log"]["loss"]) == ("running", 100, 2.5)
    every = json.loads(printed("--storage", tmp_path, "--json"))
    states = {each["uri"].rpartition("/")[2]: each["state"] for each in every}
    assert states == {"one": "running", "two": "killed"}
    for words in ([], ["--json"]):
        shown = [printed("--storage", tmp_path, *words, verb=verb) for verb in ("status", "runs")]
        one, other = (re.sub(r"_s\": ?[\d.]+", "", each) for each in shown)
        assert one == other
    assert json.loads(printed("one", "--storage", tmp_path, "--json"))["uri"] == found["uri"]


@pytest.mark.parametrize("columns", [80, 160])
def test_losses_have_headings(tmp_path: Path, columns: int, printed: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    validated = events.Validation(time_s=NOW_S, attempt=2, step=90, metrics={"loss": 1.75, "accuracy": 0.5})
    run_at(tmp_path / "one", os.getpid(), started(), FIRST, validated)
    run_at(tmp_path / "two", os.getpid(), started(), FIRST)
    headings, one, two, *_ = printed("--storage", tmp_path).splitlines()
    for heading, values in {"train loss": ("2.500", "2.500"), "validation loss": ("1.750", "")}.items():
        begin = headings.index(heading)
        cells = {line.split()[0]: line[begin : begin + len(heading)].strip() for line in (one, two)}
        assert cells == dict(zip(("one", "two"), values, strict=True))
    assert "validation loss 1.750 | accuracy 0.5000" in " ".join(printed(tmp_path / "one").split())


def test_a_folder_without_runs_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(0.0, ["status", "--storage", str(tmp_path)]) == 2
    assert f"no run below {tmp_path}; choose another place with --storage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "alive", "age_s", "state"),
    [
        ([started()], True, 0.0, "starting"),
        ([started(), FIRST], True, 0.0, "running"),
        ([started(), FIRST, LOST, ENDED], True, 0.0, "starting"),
        ([started(), FIRST, LOST, started()], True, 0.0, "starting"),
        ([started(), events.Waiting(workers=1, needed=2)], True, 0.0, "waiting for workers"),
        ([started(), FIRST], True, 60.0, "silent"),
        ([started(), FIRST], False, 0.0, "killed"),
        ([started(), FIRST, LOST.model_copy(update={"fatal": True})], False, 0.0, "failed"),
        ([LOST.model_copy(update={"fatal": True}), started(), FIRST], False, 0.0, "killed"),
    ],
)
def test_the_state_follows_from_events_and_claim(
    told: list[events.Event], alive: bool, age_s: float, state: str, tmp_path: Path
) -> None:
    directory = run_at(tmp_path, os.getpid() if alive else 2**30, *told, renewed=time.time() - age_s)
    assert state_of(told, read_owner(directory.store), None) == state
    assert state_of(told, None, {"status": "finished"}) == "finished"
