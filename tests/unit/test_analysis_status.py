"""What `status` says of runs: of those that run, have ended, or were killed."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from steadfast.analysis.status import state_of
from steadfast.cli import main
from steadfast.run import events
from steadfast.run.interrupts import EXIT_STOPPED
from steadfast.run.watching import Worker, pop_mark, write_workers
from tests.support.events import changed
from tests.support.json_tables import check_document
from tests.support.run_directories import ENDED, FIRST, LOST, NOW_S, SECOND, run_at, started


@pytest.fixture(autouse=True)
def no_wait_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.commands.status._WORKERS_S", 0.0)


def test_a_live_run_tells_its_progress_its_figures_and_what_failures_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_at(tmp_path / "run", os.getpid(), started(), FIRST, LOST, ENDED, SECOND)
    assert main(0.0, ["status", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"running on {os.uname().nodename}, pid {os.getpid()} | attempt 2" in shown
    assert re.search(r"step 100/400 25% \| last step \d+[sm] ago \| eta 10m", shown)
    assert "training loss 2.500 at step 100 | gradient norm 1.000 " in shown
    assert "39.8k tok/s | 20 ms a step" in shown
    assert "loss of worker m1 on node 01234567: reset | 3 -> 2 workers | detected in 1.0 s | back in 1.0 s" in shown
    assert "steps to repeat if lost: a worker 0 | all but storage 40" in shown
    assert "2 workers | 1 node" in shown
    assert "aaaaaaaa ranks 0-1" in shown


HANG = events.Hang(attempt=2, ranks=(1,), phase="forward", step=100, seconds=3.0, stacks="s", time_s=NOW_S)


def test_progress_names_the_ranks_that_are_stuck_until_they_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run_at(tmp_path / "run", os.getpid(), started(), FIRST, SECOND, HANG)
    assert main(0.0, ["status", directory.uri]) == 0
    assert re.search(r"ago \| rank 1 stuck in forward training", " ".join(capsys.readouterr().out.split()))
    directory.record(events.HangOver(attempt=2, ranks=(1,), phase="forward", step=100, seconds=9.0))
    assert main(0.0, ["status", directory.uri]) == 0
    assert re.search(r"ago \| eta 10m training", " ".join(capsys.readouterr().out.split()))


def test_one_reading_of_a_live_run_names_the_pids_of_its_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run_at(tmp_path / "run", os.getpid(), started(), FIRST, SECOND)

    def write_if_asked(_: float) -> None:
        assert pop_mark(directory.store)
        worker = Worker(rank=1, name="m1", node="0123", step=100, phase="forward", phase_s=0.1, host="vm", pid=4711)
        write_workers(directory.store, 2, [worker])

    monkeypatch.setattr("steadfast.commands.status.sleep", write_if_asked)
    monkeypatch.setattr("steadfast.commands.status._WORKERS_S", 2.0)
    assert main(0.0, ["status", directory.uri]) == 0
    assert "rank 1 (pid 4711) forward" in " ".join(capsys.readouterr().out.split())


def test_watch_refreshes_the_page_until_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run_at(tmp_path / "run", os.getpid(), started(), FIRST)

    def finish_and_press_ctrl_c(_: float) -> None:
        if directory.summary():
            raise KeyboardInterrupt
        directory.write_summary({"status": "finished", "step": 100, "metrics": {}})

    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes the captured output for a terminal
    monkeypatch.setattr("steadfast.commands.status.sleep", finish_and_press_ctrl_c)
    assert main(0.0, ["status", directory.uri, "--watch"]) == EXIT_STOPPED
    shown = capsys.readouterr().out
    assert 0 < shown.index(f"running on {os.uname().nodename}") < shown.index(f"finished on {os.uname().nodename}")


def test_watch_shows_the_phase_of_each_worker_and_requests_it_from_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run_at(tmp_path / "run", os.getpid(), started(), FIRST, SECOND)
    phases = (("forward", 0.1), ("forward", 0.2), ("loader", 7.0))
    workers = [
        Worker(rank=rank, name=f"m{rank}", node="a" * 56, step=100, phase=phase, phase_s=phase_s)
        for rank, (phase, phase_s) in enumerate(phases)
    ]
    write_workers(directory.store, 2, workers)

    def press_ctrl_c(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes the captured output for a terminal
    monkeypatch.setattr("steadfast.commands.status.sleep", press_ctrl_c)
    for option in ("--watch", "--live"):
        assert main(0.0, ["status", directory.uri, option]) == EXIT_STOPPED
        shown = " ".join(capsys.readouterr().out.split())
        assert "aaaaaaaa ranks 0-1 forward | rank 2 loader for 7s" in shown
        assert ("live page http://127.0.0.1:" in shown) == (option == "--live")
        assert pop_mark(directory.store)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--live", "--watch"], "one of --watch, --live and --json"),
        (["--live"], "--live shows one run: status ddp --live"),
        (["run", "--port", "8765"], "--port is the port of the web page of --live"),
        (["run", "--live", "--cluster", "FILE"], "ssh -L 8765:127.0.0.1:8765 HEAD"),
    ],
)
def test_what_live_cannot_show_is_one_message(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(0.0, ["status", *words]) == 2
    assert said in capsys.readouterr().err


def test_nodes_are_shown_with_their_ranks_gpus_and_what_a_step_costs_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = {"b" * 56: (0, 1, 3), "c" * 56: (2,)}
    gpus = ("NVIDIA H200", "NVIDIA H200", "NVIDIA L4", "NVIDIA H200")
    begun = changed(SECOND, world_size=4, nodes=nodes, gpus=gpus)
    of_another = events.RankTimes(attempt=1, step=5, num_steps=5, own_ms=(1.0, 1.0, 1.0), last=(1, 0, 0))
    times = events.RankTimes(attempt=2, step=99, num_steps=9, own_ms=(10.0, 11.0, 30.0, 10.5), last=(0, 1, 9, 0))
    run_at(tmp_path / "run", os.getpid(), started(), FIRST, of_another, LOST, ENDED, begun)
    assert main(0.0, ["status", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "bbbbbbbb ranks 0-1, 3 | 3 x NVIDIA H200 cccccccc rank 2 | 1 x NVIDIA L4" in shown
    run_at(tmp_path / "run", os.getpid(), times)
    assert main(0.0, ["status", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "3 x NVIDIA H200 | own times 10.00 to 11.00 ms a step | rank 1 is last in 10% of the checks" in shown
    assert "1 x NVIDIA L4 | own time 30.00 ms a step | rank 2 is last in 90% of the checks" in shown
    assert main(0.0, ["status", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    check_document("`status` of one run", found)
    (_, slow) = found["nodes"]
    assert slow == {"node": "c" * 56, "ranks": [2], "gpus": ["NVIDIA L4"], "own_ms": [30.0], "last": [0.9]}


def test_for_scripts_it_is_one_object_and_all_runs_are_a_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_at(tmp_path / "one", os.getpid(), started(), FIRST)
    run_at(tmp_path / "two", 2**30, started(), FIRST)
    assert main(0.0, ["status", str(tmp_path / "one"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["log"]["loss"]) == ("running", 100, 2.5)
    assert main(0.0, ["status", "--storage", str(tmp_path), "--json"]) == 0
    states = {each["uri"].rpartition("/")[2]: each["state"] for each in json.loads(capsys.readouterr().out)}
    assert states == {"one": "running", "two": "killed"}
    for words in ([], ["--json"]):
        shown = []
        for verb in ("status", "runs"):
            assert main(0.0, [verb, "--storage", str(tmp_path), *words]) == 0
            shown.append(re.sub(r"_s\": ?[\d.]+", "", capsys.readouterr().out))
        assert shown[0] == shown[1]
    assert main(0.0, ["status", "one", "--storage", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["uri"] == found["uri"]


@pytest.mark.parametrize("columns", [80, 160])
def test_losses_are_shown_by_what_they_are_of(
    tmp_path: Path, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    validated = events.Validation(time_s=NOW_S, attempt=2, step=90, metrics={"loss": 1.75, "accuracy": 0.5})
    run_at(tmp_path / "one", os.getpid(), started(), FIRST, validated)
    run_at(tmp_path / "two", os.getpid(), started(), FIRST)
    assert main(0.0, ["status", "--storage", str(tmp_path)]) == 0
    headings, one, two, *_ = capsys.readouterr().out.splitlines()
    for heading, values in {"train loss": ("2.500", "2.500"), "validation loss": ("1.750", "")}.items():
        begin = headings.index(heading)
        cells = {line.split()[0]: line[begin : begin + len(heading)].strip() for line in (one, two)}
        assert cells == dict(zip(("one", "two"), values, strict=True))
    assert main(0.0, ["status", str(tmp_path / "one")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "validation loss 1.750 | accuracy 0.5000" in shown


def test_a_folder_without_runs_and_two_runs_are_one_message_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(0.0, ["status", "--storage", str(tmp_path)]) == 2
    assert f"no run below {tmp_path}; choose another place with --storage" in capsys.readouterr().err
    assert main(0.0, ["status", "a", "b"]) == 2
    assert "status takes one run or none" in capsys.readouterr().err


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
    from steadfast.run.owner import read_owner

    directory = run_at(tmp_path, os.getpid() if alive else 2**30, *told, renewed=time.time() - age_s)
    assert state_of(told, read_owner(directory.store), None) == state
    assert state_of(told, None, {"status": "finished"}) == "finished"
