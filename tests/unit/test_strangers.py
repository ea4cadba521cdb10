"""Run directories that somebody else has written: what reading verbs show of them, open and believe."""

import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import steadfast.commands.status
from steadfast.cli import main
from steadfast.config import Config
from steadfast.run import events
from steadfast.run.directory import EVENTS, STEPS
from steadfast.run.owner import Ownership
from steadfast.storage import LocalStore
from steadfast.storage.jsonl import read_lines
from steadfast.telemetry.console import Console
from steadfast.units import printable
from tests.support.json_tables import check_document
from tests.support.run_directories import ENDED, FIRST, LOST, NOW_S, SECOND, run_at, started
from tests.support.verbs import printed

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eabc\r\b[/bold] [red]"
SHOWN = "\ufffd]0;title\ufffd\ufffd[2J\ufffd31m\ufffdabc\ufffd\ufffd[/bold] [red]"


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fold no line, and spare `status` its wait for the workers of runs that only look as if they were in progress."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(steadfast.commands.status, "_WORKERS_S", 0.0)


def append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_control_characters_are_replaced_and_lines_stay() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("a\tb\nc é 漢 \ud800") == "a\tb\nc é 漢 \ufffd"
    file = io.StringIO()
    Console(file=file).line(EVIL)
    assert file.getvalue() == f"{SHOWN}\n"


def test_no_verb_shows_control_characters_or_takes_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / EVIL.replace("/", "")
    lost = LOST.model_copy(update={"error": EVIL, "member": EVIL})
    run_at(place / "run", os.getpid(), started(), FIRST, lost, ENDED)
    run_at(place / "[red]", os.getpid(), started(), FIRST)
    owner = json.loads((place / "run" / "owner.json").read_text())
    (place / "run" / "owner.json").write_text(json.dumps({**owner, "host": EVIL}))
    commands = [["status", place / "run"], ["status", "--storage", place], ["report", place / "run"]]
    commands += [["compare", place / "run", place / "[red]"], ["audit", place / "run"], ["doctor", place / "run"]]
    commands += [["status", place / "gone"], ["runs", "--storage", place]]
    shown = ""
    for words in commands:
        assert main(0.0, [str(word) for word in words]) in (0, 1, 2)
        captured = capsys.readouterr()
        shown += captured.out + captured.err
    assert printable(shown) == shown
    assert "loss of worker \ufffd]0;title" in shown
    assert "\n[red]" in shown  # the name of a run, in the table of all


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def link(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text('{"secret": "of another user"}')
    path.unlink(missing_ok=True)
    path.symlink_to(secret)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def hole(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(2**33)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        *product(["owner.json", STEPS, EVENTS], [fifo, link, folder]),
        ("owner.json", hole),
    ],  # ledgers may be of any length
)
def test_a_spoilt_run_is_one_line_beside_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, spoil: Callable[[Path], None]
) -> None:
    place = tmp_path / "runs"
    for run in ("good", "spoilt"):
        run_at(place / run, os.getpid(), started(), FIRST)
    spoil(place / "spoilt" / name)
    lines = printed(capsys, "status", "--storage", place).out.splitlines()
    assert lines[1].startswith("good")
    assert lines[2].startswith(f"{place}/spoilt/{name} cannot be read: ")
    good, spoilt = json.loads(printed(capsys, "status", "--storage", place, "--json").out)
    assert (good["state"], spoilt["state"]) == ("running", "unreadable")
    check_document("`runs`", {name: good.pop(name) for name in ("name", "written_s", "bytes")})
    check_document("`status` of one run", good)
    check_document("`runs`", spoilt, table=1)
    assert main(0.0, ["status", str(place / "spoilt")]) in (1, 2)


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can give a file away, and reads all")
def test_a_store_does_not_write_through_a_link(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    store.commit("report.html", b"first")
    target = tmp_path / "target"
    temporary = tmp_path / "run" / f".report.html.{os.uname().nodename}-{os.getpid()}-{threading.get_native_id()}"
    temporary.symlink_to(target)
    with pytest.raises(OSError, match="the file is a link"):
        store.commit("report.html", b"second")
    assert not target.exists()


def report_of(folder: Path) -> str:
    assert main(0.0, ["report", str(folder)]) == 0
    return (folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_a_report_shows_what_was_read_from_the_configuration_and_does_not_follow_links(
    tmp_path: Path, name: str
) -> None:
    directory = run_at(tmp_path / "run", os.getpid(), started(), FIRST)
    directory.write_config(Config())
    with (tmp_path / "run" / "config.yaml").open("a") as file:
        file.write("# words that are no configuration\n")
    page = report_of(tmp_path / "run")
    assert "global_size" in page
    assert "words that are no configuration" not in page
    link(tmp_path / "run" / name)
    page = report_of(tmp_path / "run")
    assert "of another user" not in page
    assert ("the file is a link, which is not followed" in page) is (name == "config.yaml")


NAN = float("nan")
NUMBERS: list[Any] = [NAN, float("inf"), 1e300, -1e18, 10**400, 10**30, -5, None, "x", [1]]


@pytest.mark.parametrize("value", NUMBERS, ids=str)
def test_impossible_numbers_end_no_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any) -> None:
    folder = tmp_path / "run"
    run_at(folder, os.getpid(), started(), FIRST)
    first = {**FIRST.to_line(), "attempt": 2, "time_s": NOW_S}
    for key in ("time_s", "step", "attempt", "world_size", "detected_s", "nodes", "gpus"):
        append(folder / EVENTS, {**first, key: value})
    append(folder / EVENTS, {**first, "nodes": {"a": [0, 7, 10**6]}, "gpus": ["a"]})
    append(folder / EVENTS, {"time_s": NOW_S, "event": "validation", "step": 9, "metrics": {"loss": value}})
    line = {"step": 101, "attempt": 2, "num_samples": 8, "step_s": 0.02, "time_s": NOW_S, "loss": 1.0, "shares": [1]}
    for key in line:
        append(folder / STEPS, {**line, key: value})
    log = json.loads((folder / "metrics.jsonl").read_text())
    for key in log:
        append(folder / "metrics.jsonl", {**log, key: value})
    append(folder / "metrics.jsonl", {**log, "loss": value, "grad_norm": value, "total_steps": 0})
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "step": value, "metrics": {"loss": value}}))
    for words in (["status"], ["report"], ["doctor"], ["audit", "--samples", "64"], ["compare", str(folder)]):
        assert main(0.0, [words[0], str(folder), *words[1:]]) in (0, 1, 2)
    capsys.readouterr()
    json.loads(printed(capsys, "status", folder, "--json").out, parse_constant=pytest.fail)


def test_a_hole_in_a_ledger_costs_one_reading(tmp_path: Path) -> None:
    path = tmp_path / STEPS
    append(path, {"step": 1})
    with path.open("ab") as file:
        file.truncate(2**28)
        file.seek(0, os.SEEK_END)
        file.write(b'{"step": 2}\n{"step": 3}\n')
    began_s = time.process_time()
    # The line that the hole begins is none, whatever it ends with.
    assert [line["step"] for line in read_lines(LocalStore(tmp_path), STEPS)] == [1, 3]
    assert time.process_time() - began_s < 2.0


def test_lines_of_every_length_are_read(tmp_path: Path) -> None:
    lengths = [1, 2**22 - 20, 2**22, 2**23, 2**24 - 100, 3]
    append(tmp_path / STEPS, *({"step": number, "x": "y" * length} for number, length in enumerate(lengths)))
    assert [len(line["x"]) for line in read_lines(LocalStore(tmp_path), STEPS)] == lengths


def test_an_event_that_says_nothing_possible_is_none() -> None:
    line = FIRST.to_line()
    assert events.parse_event(line) == FIRST
    for name, value in {"time_s": NAN, "detected_s": 1e300, "step": 10**30, "nodes": {"a": [10**30]}}.items():
        assert events.parse_event({**line, name: value}) is None


def test_runs_that_another_user_keeps_private_hide_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_at(tmp_path / "good", os.getpid(), started(), FIRST)
    shutil.copytree(tmp_path / "good", tmp_path / "private")
    real = LocalStore.read

    def read(store: LocalStore, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        if store.path.name == "private":
            raise PermissionError(13, "Permission denied", str(store.path / name))
        return real(store, name, start, num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "read", read)
        lines = printed(capsys, "status", "--storage", tmp_path).out.splitlines()
    assert lines[1].startswith("good")
    assert lines[2].endswith("private/owner.json cannot be read: Permission denied")


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_files_of_a_run_are_as_private_as_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        Ownership.claim(LocalStore(tmp_path / "run")).release()
        directory = run_at(tmp_path / "run", os.getpid(), started(), FIRST)
        directory.store.commit("stacks/attempt-1", b"stacks")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != "owner.key"]
    assert len(files) == 5
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_tensors_that_processes_share_have_no_name() -> None:
    before = set(os.listdir("/dev/shm"))
    shared = torch.zeros(1000).share_memory_()
    assert shared.is_shared()
    assert not [name for name in set(os.listdir("/dev/shm")) - before if f"_{os.getpid()}_" in name]


def test_a_report_escapes_what_it_shows(tmp_path: Path) -> None:
    script = "<script>alert(1)</script><img src=x onerror=alert(2)>"
    lost = LOST.model_copy(update={"error": script, "member": script, "node": script})
    second = SECOND.model_copy(update={"source": script, "nodes": {script: (0, 1)}})
    run_at(tmp_path / "run", os.getpid(), started(), FIRST, lost, ENDED, second)
    (tmp_path / "run" / "environment.json").write_text(json.dumps({script: script}))
    page = report_of(tmp_path / "run")
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    assert "<img src=x" not in page
