"""`runs`: the list of all runs, and what `--delete` deletes, keeps and refuses."""

import io
import json
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from steadfast.cli import main
from steadfast.run.directory import EVENTS, STEPS, RunDirectory
from steadfast.run.events import RunStarted, Validation
from steadfast.run.owner import Ownership, read_owner
from steadfast.storage import LocalStore

YEAR_2027_S = 1_800_000_000.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A storage with two runs that are over, and a folder that is no run."""
    monkeypatch.setenv("COLUMNS", "200")
    for name, step in (("old", 3), ("new", 7)):
        directory = RunDirectory(LocalStore(tmp_path / "runs" / name))
        Ownership.claim(directory.store).release()
        directory.record(RunStarted(time_s=YEAR_2027_S, launcher="ray"))
        directory.record(Validation(time_s=YEAR_2027_S + 60 * step, step=step, metrics={"loss": 1.5}))
        directory.store.commit(STEPS, json.dumps({"step": step, "attempt": 1, "time_s": YEAR_2027_S}).encode() + b"\n")
        directory.store.commit("checkpoints/step-1/data", bytes(2**20))
    (tmp_path / "runs" / "folder").mkdir()
    return tmp_path / "runs"


def runs(place: Path, *words: str) -> int:
    return main(0.0, ["runs", "--storage", str(place), *words])


def test_list_has_step_loss_date_and_size_of_runs_newest_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(place) == 0
    _, *lines, total = capsys.readouterr().out.splitlines()
    new, old = (re.split("  +", line.strip()) for line in lines)
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(YEAR_2027_S + 420))
    assert new == ["new", "killed", "7", "1.500", written, "1.0 MiB"]
    assert old[:3] == ["old", "killed", "3"]
    assert total == f"2 runs, 2.0 MiB, below {place}"
    assert runs(place, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found] == ["new", "old"]
    assert found[0]["metrics"] == {"loss": 1.5}
    assert found[0]["bytes"] > 2**20


def test_deleted_run_is_gone_and_its_neighbours_stay(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "old" / f".{EVENTS}.host-1").touch()  # of a command that was killed during a commit
    (place / "old" / "checkpoint_manager_snapshot.json").touch()
    assert runs(place, "--delete", "old", "--yes") == 0
    assert sorted(each.name for each in place.iterdir()) == ["folder", "new"]
    assert capsys.readouterr().out == f"deleted {place}/old: killed, step 3, 1.0 MiB\n"
    assert runs(place, "--delete", "new", "--yes", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["deleted"], found["kept"]) == (f"{place}/new", [])


def test_links_of_a_run_are_deleted_and_not_followed_and_files_that_no_run_writes_are_kept(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").touch()
    (place / "old" / "tensorboard").symlink_to(tmp_path / "precious")
    (place / "old" / "checkpoints" / "link").symlink_to(tmp_path / "precious")
    (place / "old" / "notes.txt").write_text("of the user")
    assert runs(place, "--delete", "old", "--yes") == 0
    assert [each.name for each in (place / "old").iterdir()] == ["notes.txt"]
    assert (tmp_path / "precious" / "file").exists()
    assert "kept what no run writes: notes.txt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folder", "is no run directory: it has no valid owner.json"),
        ("nothing", "is no run directory"),
        ("link", "is a link, which is not followed"),
        ("../runs/old", "--delete takes the name of a run, not '../runs/old'"),
        ("..", "--delete takes the name of a run"),
        ("", "--delete takes the name of a run"),
    ],
)
def test_what_is_no_run_there_is_refused(place: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "link").symlink_to(place / "old")
    before = sorted(place.rglob("*"))
    assert runs(place, "--delete", name, "--yes") == 2
    assert said in capsys.readouterr().err
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("summary", [None, {"status": "finished", "step": 3, "metrics": {}}])
def test_run_that_another_command_owns_is_refused(
    place: Path, summary: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(LocalStore(place / "old"))
    Ownership.claim(directory.store)
    if summary:  # a command writes the summary before it releases its claim
        directory.write_summary(summary)
    assert runs(place, "--delete", "old", "--yes") == 2
    assert f"on {socket.gethostname()}, pid {os.getpid()}" in capsys.readouterr().err
    assert read_owner(directory.store) is not None
    assert directory.last_step() == 3


@pytest.mark.parametrize(
    ("answer", "deletes"), [("y\n", True), ("yes\n", True), ("\n", False), ("no\n", False), ("", False)]
)
def test_answer_decides_about_the_deletion(
    place: Path, answer: str, deletes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    assert runs(place, "--delete", "old") == int(not deletes)
    assert f"delete the run {place}/old: killed, step 3, 1.0 MiB? [y/N] " in capsys.readouterr().err
    assert (place / "old").exists() is not deletes


def test_interrupted_deletion_can_be_repeated(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    delete = LocalStore.delete

    def fail(store: LocalStore, name: str) -> None:
        if name == "checkpoints":
            raise OSError(5, "Input/output error", "checkpoints")
        delete(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", fail)
        assert runs(place, "--delete", "old", "--yes") == 1
    assert "The same command deletes the rest" in capsys.readouterr().err
    # The command that failed is over.
    owner = json.loads((place / "old" / "owner.json").read_text())
    (place / "old" / "owner.json").write_text(json.dumps({**owner, "renewed": 0.0}))
    assert runs(place, "--delete", "old", "--yes") == 0
    assert not (place / "old").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("old", "status old"),
        ("--yes", "--yes belongs to --delete"),
        ("--storage nowhere", "no run below"),
        ("--storage file://{place} --delete old --yes", "give --storage as a path"),
        ("--delete old", "there is no terminal. --yes deletes without a question"),
    ],
)
def test_bad_usage(
    place: Path, words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert runs(place, *words.format(place=place).split()) == 2
    assert said in capsys.readouterr().err
    assert (place / "old").exists()
