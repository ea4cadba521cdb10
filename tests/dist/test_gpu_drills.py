"""What runs the drills for a GPU: states, exit codes, bounds and the table. The drills themselves need the GPU."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.gpu.catalog import CATALOG
from tests.gpu.drills import JOBS, main
from tests.gpu.report import exit_code, table
from tests.gpu.runner import Drill, Result, Runner, expected_s
from tests.support.leftovers import wait_until_gone
from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]


def fake(name: str, **options: float | str | bool) -> Drill:
    return Drill(name, f"it {name}", f"tests.gpu.fakes:{name}", torch_alone=True, **options)  # type: ignore[arg-type]


def run(tmp_path: Path, *drills: Drill, minutes: float = 5.0) -> dict[str, Result]:
    results = Runner(tmp_path, tmp_path, "cpu", minutes, jobs=4).run(drills)
    assert [result.name for result in results] == [drill.name for drill in drills]
    return {result.name: result for result in results}


def test_each_ending_has_its_state_and_leaves_no_checkpoints(tmp_path: Path) -> None:
    names = ("passes", "fails", "raises", "skips", "dies", "lacks_a_package", "lacks_a_module_of_ours", "saves")
    results = run(tmp_path, *(fake(name) for name in names))
    states = {name: (result.state, result.reason) for name, result in results.items()}
    assert states.pop("dies")[1].startswith("the process ended with 7")
    assert states == {
        "passes": ("REHEARSED", ""),
        "saves": ("REHEARSED", ""),
        "fails": ("FAILED", "the first claim; the second | claim"),
        "raises": ("FAILED", "ValueError: of cpu"),
        "skips": ("SKIPPED", "it lacks a second GPU"),
        "lacks_a_package": ("SKIPPED", "the app cannot be imported: No module named 'package_that_nobody_has'"),
        "lacks_a_module_of_ours": (
            "FAILED",
            "the drill does not fit this code: No module named 'steadfast.moved_elsewhere'",
        ),
    }
    assert results["dies"].state == "FAILED"
    assert results["passes"].figures == {"answer": 42, "ratio": 0.9877}
    assert results["fails"].figures == {"between": 1}
    assert (tmp_path / "saves" / "note.txt").exists()
    assert not (tmp_path / "saves" / "model.safetensors").exists()


def test_what_needs_the_app_is_skipped_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "pydantic.py").write_text("raise ModuleNotFoundError('No module named pydantic', name='pydantic')")
    monkeypatch.setenv("PYTHONPATH", str(bare))
    results = run(tmp_path, Drill("with-app", "", "tests.gpu.fakes:passes"), fake("passes"))
    assert results["with-app"].state == "SKIPPED"
    assert results["with-app"].reason == "the app cannot be imported: No module named pydantic"
    assert results["passes"].state == "REHEARSED"


def test_packages_that_the_caller_names_by_pythonpath_are_found(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "package_that_nobody_has.py").write_text("")
    code = (
        "from tests.dist.test_gpu_drills import fake, main\n"
        f"main(['--out', {str(tmp_path / 'out')!r}, '--device', 'cpu', '--all'], [fake('lacks_a_package')])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    assert "| lacks_a_package | REHEARSED |" in (tmp_path / "out" / "table.md").read_text()


def test_a_drill_that_hangs_has_failed_and_leaves_no_process(tmp_path: Path) -> None:
    result = run(tmp_path, fake("hangs", bound_s=1.0))["hangs"]
    assert (result.state, result.reason) == ("FAILED", "it did not end within 2 s")
    wait_until_gone([int(result.figures["sleeper"])], 5)


def test_when_the_time_is_over_the_rest_is_skipped(tmp_path: Path) -> None:
    results = run(tmp_path, fake("hangs", alone=True), fake("passes"), minutes=1 / 60)
    assert results["hangs"].state == "SKIPPED"
    assert "cut off" in results["hangs"].reason
    assert (results["passes"].state, results["passes"].reason) == ("SKIPPED", "no time was left")


def test_what_says_nothing_without_another_drill_is_skipped(tmp_path: Path) -> None:
    needy = Drill("needy", "", "tests.gpu.fakes:passes", needs="fails", torch_alone=True)
    results = run(tmp_path, fake("fails", alone=True), needy)
    assert results["needy"].state == "SKIPPED"
    assert results["needy"].reason.startswith("fails is FAILED")


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["PASSED", "PASSED"], 0),
        (["PASSED", "FAILED", "SKIPPED"], 1),
        (["FAILED"], 1),
        (["SKIPPED", "SKIPPED"], 3),
        (["PASSED", "SKIPPED"], 4),
        (["REHEARSED", "REHEARSED"], 0),
        (["REHEARSED", "FAILED"], 1),
    ],
)
def test_exit_codes(states: list[str], code: int) -> None:
    assert exit_code([Result("one", state) for state in states]) == code  # type: ignore[arg-type]


def test_the_table_says_where_and_when_and_keeps_its_columns() -> None:
    results = [Result("one", "FAILED", 2.4, "a | b\nc", {"gb_s": 1.23456, "n": 3}), Result("two", "PASSED")]
    lines = table(results, {"GPU": "H100", "commit": "abc"}, "cuda").splitlines()
    assert lines[0] == "GPU H100 · commit abc"
    assert lines[2:6] == [
        "| drill | state | s | figures | reason |",
        "|---|---|---|---|---|",
        "| one | FAILED | 2 | gb_s 1.235, n 3 | a \\| b c |",
        "| two | PASSED | 0 |  |  |",
    ]
    assert lines[-1] == "1 PASSED, 1 FAILED, 0 SKIPPED"
    assert table(results, {}, "cpu").startswith("**Rehearsal without a GPU")


def test_the_command_runs_the_first_all_or_those_that_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--out", str(tmp_path / "new"), "--device", "cpu", "--only", "passes,skips"]
    assert main(command, [fake("passes"), fake("fails"), fake("skips")]) == 4
    written = (tmp_path / "new" / "table.md").read_text()
    assert written in capsys.readouterr().out
    assert "torch 2." in written
    drills = [fake("passes", first=True, alone=True), fake("fails", first=True), fake("skips")]
    assert main(["--out", str(tmp_path), "--device", "cpu"], drills) == 1
    lines = [json.loads(line) for line in (tmp_path / "drills.jsonl").read_text().splitlines()]
    assert [(line["name"], line["state"]) for line in lines] == [("passes", "REHEARSED"), ("fails", "FAILED")]
    said = capsys.readouterr().out
    assert "REHEARSED passes" in said
    assert '  {"answer": 42, "ratio": 0.9877}' in said
    assert main(["--out", str(tmp_path), "--device", "cpu", "--all"], drills) == 1
    assert "| skips | SKIPPED |" in (tmp_path / "table.md").read_text()
    capsys.readouterr()
    assert main(["--only", "passes,flies"], [fake("passes")]) == 2
    assert "flies" in capsys.readouterr().err
    assert main(["--list"], [fake("fails")]) == 0
    assert capsys.readouterr().out == "fails                    0 s  it fails\n"


# A module that cannot be imported stands in the place of an interpreter without torch.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from tests.gpu.drills import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # One that ends at once, should it be started after all.
        (["-m", "tests.gpu.drills", "--only", "ceilings", "--out", "new"], "sees no CUDA device"),
        (["-c", WITHOUT_TORCH, "--out", "new"], "cannot import torch ("),
    ],
    ids=["CUDA", "torch"],
)
def test_without_cuda_or_torch_one_line_says_what_is_missing(tmp_path: Path, words: list[str], said: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, *words[:-1], str(tmp_path / "new")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("nothing was checked: ")
    assert said in done.stderr
    assert not (tmp_path / "new").exists()


def test_every_drill_says_what_it_asserts_and_needs_no_ray() -> None:
    code = """
import sys
from importlib import import_module
from tests.gpu.catalog import CATALOG
for drill in CATALOG:
    module, _, name = drill.target.partition(":")
    text = getattr(import_module(module), name).__doc__
    assert "Asserts" in text and "Figures" in text, drill.name
import steadfast.launch.torchrun, steadfast.commands.train
print([name for name in ("ray", "pyarrow", "tensorboard", "pytest", "sklearn") if name in sys.modules])
"""
    assert run_program("-c", code).strip() == "[]"
    # Each has a name of its own, and is not taken without the one that it needs.
    first = {drill.name: drill.first for drill in CATALOG}
    assert len(first) == len(CATALOG)
    assert all(first[drill.needs] for drill in CATALOG if drill.needs)
    # `make gpu` has 480 seconds, of which the machine's start of Python and torch take some.
    assert expected_s([drill for drill in CATALOG if drill.first], JOBS) <= 455


def test_a_command_that_is_ended_leaves_results_and_logs(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    code = (
        "from tests.dist.test_gpu_drills import fake, main\n"
        f"folders = ['--out', {str(out)!r}, '--work', {str(work)!r}]\n"
        "main([*folders, '--device', 'cpu', '--all'], [fake('saves', alone=True), fake('hangs')])"
    )
    command = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + 60
    while not (work / "hangs" / "figures.json").exists():
        assert time.monotonic() < until_s, command.poll()
        time.sleep(0.05)
    assert "| saves | REHEARSED |" in (out / "table.md").read_text()
    command.terminate()
    command.wait(30)
    assert "| hangs | SKIPPED |" in (out / "table.md").read_text()
    with tarfile.open(out / "logs.tar.gz") as logs:
        names = logs.getnames()
    assert "saves/note.txt" in names
    assert "hangs/log.txt" in names
    assert not any(name.endswith(".safetensors") for name in names)
