"""The grammar of the command line: verbs, their help, and what is told before anything is started."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.cli import main
from app.commands import VERBS
from app.config import Config

ROOT = Path(__file__).parents[2]

TAKES = {
    "train": ["--config FILE", "key=value", "--job"],
    "plan": ["--config FILE", "key=value", "--mtbf TIME", "--json"],
    "scale": ["RUN", "--workers MIN:MAX"],
    "status": ["RUN", "--watch", "--json", "--storage PLACE"],
    "config": ["SECTION"],
    "report": ["RUN"],
    "audit": ["RUN", "--samples N", "--json", "--trust-code"],
    "verify": ["RUN", "--json"],
    "doctor": ["RUN", "--config FILE", "key=value", "--json"],
    "export": ["RUN", "--out FILE", "--step N", "--trust-code"],
    "chaos": ["--config FILE", "key=value", "--minutes N"],
}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that `train` was asked to train, without doing it."""
    configs: list[Config] = []
    monkeypatch.setattr("app.commands.train.train", lambda config, *_: configs.append(config) or 0)
    return configs


def test_a_verb_is_a_file_and_a_line_in_the_table() -> None:
    files = {path.stem for path in (ROOT / "app" / "commands").glob("*.py")}
    assert files == {*VERBS, "__init__", "options"}
    assert VERBS.keys() == TAKES.keys()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_each_verb_has_a_help_of_its_own(verb: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(0.0, [verb, option])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: main.py {verb} ")
    assert all(each in text for each in [*TAKES[verb], "--cluster FILE", "--verbose"])
    for other in TAKES.keys() - {verb}:
        foreign = set(TAKES[other]) - set(TAKES[verb]) - {"RUN"}
        assert not [each for each in foreign if each in text]


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--config", "ddp.yaml", "--help"], ["-h", "run.steps=3"]])
def test_without_a_verb_help_is_the_overview(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(0.0, words) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: main.py [verb] --config FILE [key=value ...]\n\nrun:\n  train (default)  ")
    for verb in VERBS.values():
        assert f"  {verb.usage}  " in text
        assert verb.summary in " ".join(text.split())
    assert "exit codes: 0 finished, 1 training failed, 2 bad usage or configuration, 3 stopped on request" in text


def test_without_arguments_three_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(0.0, []) == 0
    assert capsys.readouterr().out.count("\n  python main.py ") == 3


@pytest.mark.parametrize("words", [["train"], []])
@pytest.mark.parametrize(
    "rest",
    [
        ["--config", "ddp.yaml", "run.steps=60", "optimizer.lr=0.5", "-v"],
        ["run.steps=60", "-v", "optimizer.lr=0.5", "--config=ddp.yaml"],
        ["run.steps=60", "-c", "ddp.yaml", "optimizer.lr=0.5"],
    ],
)
def test_options_and_overrides_come_in_any_order(words: list[str], rest: list[str], trained: list[Config]) -> None:
    assert main(0.0, [*words, *rest]) == 0
    assert main(0.0, [*rest, *words]) == 0
    assert [(config.run.steps, config.optimizer.lr) for config in trained] == [(60, 0.5)] * 2


@pytest.mark.parametrize(
    "words",
    [
        ["scale", "ddp", "--workers", "2:8", "--cluster", "c.yaml"],
        ["--cluster", "c.yaml", "--workers", "2:8", "scale", "ddp"],
        ["-v", "scale", "--workers=2:8", "--cluster=c.yaml", "ddp"],
    ],
)
def test_a_verb_may_stand_behind_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("app.commands.scale.run_on_cluster", lambda options: given.append(options) or 0)
    assert main(0.0, words) == 0
    assert [(options.runs, options.workers, options.cluster) for options in given] == [(["ddp"], "2:8", "c.yaml")]


def test_a_file_may_be_called_like_a_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[Config]
) -> None:
    shutil.copy(ROOT / "configs" / "ddp.yaml", tmp_path / "doctor")
    monkeypatch.chdir(tmp_path)
    assert main(0.0, ["--config", "doctor"]) == 0
    assert len(trained) == 1


def test_a_run_may_be_called_like_a_verb_or_an_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("train", "lr=0.1"):
        assert main(0.0, ["doctor", run]) == 2
        assert f"no run at {tmp_path / run} or " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["tarin"], ["tarin", "ddp", "--workers", "2"], ["--config", "ddp.yaml", "tarin"], ["tarin", "--help"]],
)
def test_an_unknown_verb_is_refused_with_the_known_ones(
    words: list[str], capsys: pytest.CaptureFixture[str], trained: list[Config]
) -> None:
    assert main(0.0, words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: unknown verb tarin; there are: {', '.join(VERBS)}. ")
    assert "Overrides are written key=value" in said
    assert not trained


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.steps=3"], "--config FILE is missing, for example --config ddp.yaml"),
        (["chaos"], "--config FILE is missing, for example --config ddp.yaml"),
        (["--config", "pdd.yaml"], "pdd.yaml: no such file, here or in configs/; nearest is ddp.yaml"),
        (["chaos", "--config", "ddp.yaml", "optimizer.lrr=3"], "unknown key; nearest is lr"),
        (["scale", "ddp"], "scale takes one run and --workers, for example: scale ddp --workers 2:8"),
        (["scale", "--workers", "2"], "scale takes one run and --workers, for example: scale ddp --workers 2:8"),
        (["scale", "ddp", "--workers", "3:2"], "--workers 3:2: must be MIN:MAX with 1 <= MIN <= MAX"),
        (["doctor", "one", "another"], "doctor takes one run, for example: doctor ddp"),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], trained: list[Config]
) -> None:
    assert main(0.0, words) == 2
    assert said in capsys.readouterr().err
    assert not trained


@pytest.mark.parametrize("words", [["doctor", "ddp", "--workers", "2"], ["--config", "ddp.yaml", "--minutes", "2"]])
def test_an_option_of_another_verb_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str], trained: list[Config]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(0.0, words)
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
    assert not trained


def test_a_job_is_the_same_command_without_job(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    job = SimpleNamespace(run_as_job=lambda config, arguments: given.append(arguments) or 0)
    monkeypatch.setitem(sys.modules, "app.launch.job", job)
    assert main(0.0, ["train", "--job", "--config", "ddp.yaml", "run.steps=3"]) == 0
    assert given == [["train", "--config", "ddp.yaml", "run.steps=3"]]


def test_chaos_gets_its_minutes_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    command = Namespace(chaos=lambda *arguments: given.append(arguments) or 1)
    monkeypatch.setitem(sys.modules, "tests.chaos.command", command)
    assert main(0.0, ["chaos", "--minutes", "9", "--config", "ddp.yaml", "run.seed=3"]) == 1
    assert given == [("ddp.yaml", ["run.seed=3"], 9.0)]


def test_an_installed_package_says_that_chaos_needs_a_checkout(tmp_path: Path) -> None:
    for name in ("app", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys; sys.path.insert(0, '.'); from app.cli import main; sys.exit(main(0.0))"
    words = [sys.executable, "-I", "-c", code, "chaos", "--config", "ddp.yaml"]
    finished = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: chaos needs a checkout of the repository")
    assert finished.stderr.count("\n") == 1


def test_what_chaos_itself_lacks_is_not_taken_for_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tests.chaos.command", "tests.chaos.matrix"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tests.chaos.matrix", None)
    with pytest.raises(ModuleNotFoundError, match=r"tests\.chaos\.matrix"):
        main(0.0, ["chaos", "--config", "ddp.yaml"])


def test_help_imports_neither_torch_nor_ray() -> None:
    """Of any verb; one after the other in one process, since each process takes a while to start."""
    code = """
import sys
from app.cli import main

for verb in sys.argv[1:]:
    try:
        main(0.0, [*verb.split(), "--help"])
    except SystemExit:
        print(f"{verb}:", [name for name in ("torch", "ray", "pyarrow", "numpy") if name in sys.modules])
"""
    command = [sys.executable, "-c", code, "", *VERBS]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for verb in ("", *VERBS):
        assert f"{verb}: []\n" in answer.stdout


def test_a_variable_that_is_not_there_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(0.0, ["--config", "ddp.yaml", "cluster.env={NOT_SET_ANYWHERE: null}"]) == 2
    assert capsys.readouterr().err == (
        "error: cluster.env.NOT_SET_ANYWHERE: is null, and this command's environment has no NOT_SET_ANYWHERE: "
        "export it, or give a value here\n"
    )
