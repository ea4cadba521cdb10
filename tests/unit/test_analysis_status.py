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
from tests.support.events import changed
from tests.support.run_directories import ENDED, FIRST, LOST, NOW_S, SECOND, run_at, started


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
    assert "steps to redo after the loss of: worker 0, everything 40" in shown
    assert "2 workers | 1 node" in shown
    assert "aaaaaaaa ranks 0-1" in shown


def test_watch_refreshes_the_page_until_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run_at(tmp_path / "run", os.getpid(), started(), FIRST)

    def finish_and_press_ctrl_c(_: float) -> None:
        if directory.summary():
            raise KeyboardInterrupt
        directory.write_summary({"status": "finished", "step": 100, "metrics": {}})

    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes the captured output for a terminal
    monkeypatch.setattr("steadfast.commands.status.time.sleep", finish_and_press_ctrl_c)
    assert main(0.0, ["status", directory.uri, "--watch"]) == EXIT_STOPPED
    shown = capsys.readouterr().out
    assert 0 < shown.index(f"running on {os.uname().nodename}") < shown.index(f"finished on {os.uname().nodename}")


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
    (_, slow) = json.loads(capsys.readouterr().out)["nodes"]
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
    assert main(0.0, ["status", "--storage", str(tmp_path)]) == 0
    assert "39.8k tok/s" in capsys.readouterr().out
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
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for heading, values in {("train", "loss"): ("2.500", "2.500"), ("validation", "loss"): ("1.750", "")}.items():
        begin = first.index(heading[0])
        assert second[begin:].startswith(heading[1])
        cells = {line.split()[0]: line[begin : begin + len(heading[0])].strip() for line in lines}
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
