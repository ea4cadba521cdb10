"""The grammar of the command line: verbs, their help, and what is told before anything is started."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from steadfast.cli import main
from steadfast.commands import VERBS
from steadfast.config import Config
from steadfast.errors import UsageError
from tests.support.verbs import printed

ROOT = Path(__file__).parents[2]

TAKES: dict[str, list[str]] = {
    "init": ["FOLDER"],
    "completion": [],
    "tokenize": ["--tokenizer NAME", "--out FILE", "--column COLUMN", "--end-token TOKEN"],
    "index": ["--config FILE", "key=value", "--out FOLDER"],
    "train": ["--config FILE", "key=value", "--job"],
    "plan": ["--config FILE", "key=value", "--mtbf TIME", "--json"],
    "scale": ["RUN", "--workers MIN:MAX", "--storage PLACE"],
    "status": ["RUN", "--watch", "--live", "--port N", "--json", "--storage PLACE"],
    "config": ["SECTION", "--schema"],
    "report": ["RUN", "--storage PLACE"],
    "audit": ["RUN", "--samples N", "--json", "--trust-code", "--storage PLACE"],
    "compare": ["RUN", "--html FILE", "--json", "--storage PLACE"],
    "runs": ["--delete NAME", "--yes", "--json", "--storage PLACE"],
    "doctor": ["RUN", "--config FILE", "key=value", "--json", "--storage PLACE"],
    "export": ["RUN", "--out FILE", "--step N", "--trust-code", "--storage PLACE"],
    "chaos": ["--config FILE", "key=value", "--minutes N"],
}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that `train` was asked to train, without doing it."""
    configs: list[Config] = []
    monkeypatch.setattr("steadfast.commands.train.train", lambda config, *_: configs.append(config) or 0)
    return configs


def test_a_verb_is_a_file_and_a_line_in_the_table() -> None:
    files = {path.stem for path in (ROOT / "app/steadfast/commands").glob("*.py")}
    assert files == {*VERBS, "__init__", "options"}
    assert VERBS.keys() == TAKES.keys()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_each_verb_has_a_help_of_its_own(verb: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(0.0, [verb, option])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: steadfast {verb} ")
    assert all(each in text for each in [*TAKES[verb], "--cluster FILE", "--verbose"])
    for other in TAKES.keys() - {verb}:
        foreign = set(TAKES[other]) - set(TAKES[verb]) - {"RUN", "FOLDER"}
        assert not [each for each in foreign if each in text]


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--config", "ddp.yaml", "--help"], ["-h", "run.steps=3"]])
def test_without_a_verb_help_is_the_overview(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *words).out
    assert text.startswith("usage: steadfast [verb] --config FILE [key=value ...]\n\nbegin:\n  init [FOLDER]  ")
    for verb in VERBS.values():
        assert f"  {verb.usage}  " in text
        assert verb.summary in " ".join(text.split())
    assert "exit codes: 0 finished, 1 training failed, 2 bad usage or configuration, 3 stopped on request" in text


def test_without_arguments_three_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys).out.count("\n  steadfast ") == 3


def test_version_prints_steadfast_torch_and_ray_in_one_line_or_which_of_them_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = ("steadfast", "torch", "ray")
    assert printed(capsys, "--version").out == ", ".join(f"{name} {version(name)}" for name in packages) + "\n"
    monkeypatch.setattr("steadfast.cli.version", Mock(side_effect=PackageNotFoundError))
    assert printed(capsys, "--version").out == ", ".join(f"{name} not installed" for name in packages) + "\n"


@pytest.mark.parametrize("words", [["train"], []])
@pytest.mark.parametrize(
    "rest",
    [
        ["--config", "ddp.yaml", "run.steps=60", "optimizer.lr=0.5", "-v"],
        ["run.steps=60", "-v", "optimizer.lr=0.5", "--config=ddp.yaml"],
        ["run.steps=60", "-c", "ddp.yaml", "optimizer.lr=0.5"],
        # As torch.distributed.launch gives the rank.
        ["--local-rank=0", "-c", "ddp.yaml", "run.steps=60", "optimizer.lr=0.5"],
        ["--local_rank=0", "-c", "ddp.yaml", "run.steps=60", "optimizer.lr=0.5"],
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
        ["--storage", "runs", "scale", "ddp", "--workers", "2:8", "--cluster", "c.yaml"],  # called like a verb
    ],
)
def test_a_verb_may_stand_behind_options(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Namespace] = []
    monkeypatch.setattr("steadfast.commands.scale.run_on_cluster", lambda options: given.append(options) or 0)
    assert main(0.0, words) == 0
    (options,) = given
    assert (options.runs, options.workers, options.cluster, options.storage) == (["ddp"], "2:8", "c.yaml", "runs")


def test_file_or_run_may_be_called_like_a_verb_and_a_run_like_an_override(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "configs" / "ddp.yaml", tmp_path / "doctor")
    monkeypatch.chdir(tmp_path)
    assert main(0.0, ["--config", "doctor"]) == 0
    assert len(trained) == 1
    for run in ("train", "lr=0.1"):
        assert f"no run at {tmp_path / run} or " in printed(capsys, "doctor", run, code=2).err


RUN_VERBS = {
    "status": ["status", "ddp"],
    "scale": ["scale", "ddp", "--workers", "1:2"],
    "report": ["report", "ddp"],
    "doctor": ["doctor", "ddp"],
    "export": ["export", "ddp", "--out", "x.pt"],
    "audit": ["audit", "ddp"],
    "compare": ["compare", "ddp", "ddp"],
}


@pytest.mark.parametrize("verb", RUN_VERBS)
def test_a_run_is_named_by_a_path_by_storage_or_as_training_names_it(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[str] = []

    def open_run(name: str, storage: str = "runs") -> None:
        found.append(str(Path(storage, name)))
        if len(found) == (2 if verb == "compare" else 1):
            raise UsageError("far enough")

    monkeypatch.setattr(f"steadfast.commands.{verb}.find_run", open_run)
    words = RUN_VERBS[verb]
    as_overrides = [word.replace("ddp", "run.name=ddp") for word in words]
    for given in (words, [*words, "--storage", "/there"], [*words, "run.storage=/there"]):
        assert "far enough" in printed(capsys, *given, code=2).err
        place = "runs/ddp" if given is words else "/there/ddp"
        assert set(found) == {place}
        found.clear()
    if verb != "doctor":  # without a run it checks the machines
        assert main(0.0, [*as_overrides, "run.storage=/there"]) == 2
        assert set(found) == {"/there/ddp"}


@pytest.mark.parametrize("words", [["run.storage=/there"], ["--storage", "/there"]])
def test_doctor_without_a_run_takes_overrides(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Config] = []
    monkeypatch.setattr("steadfast.commands.doctor._check_machines", lambda config, _: checked.append(config) or 0)
    assert main(0.0, ["doctor", *words]) == 0
    assert main(0.0, ["doctor", "--config", "ddp.yaml", *words]) == 0
    assert [config.run.storage for config in checked] == ["/there", "/there"]


@pytest.mark.parametrize("words", [["config"], ["--help"]])
def test_a_reader_that_leaves_ends_a_verb_quietly(words: list[str]) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    program = [sys.executable, "main.py", *words]
    with subprocess.Popen(
        program, cwd=ROOT, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        command.stdout.close()
        assert command.stderr is not None
        assert command.stderr.read() == ""
    assert command.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    "words",
    [["tarin"], ["tarin", "ddp", "--workers", "2"], ["--config", "ddp.yaml", "tarin"], ["tarin", "--help"]],
)
def test_unknown_verb_is_refused(words: list[str], capsys: pytest.CaptureFixture[str], trained: list[Config]) -> None:
    said = printed(capsys, *words, code=2).err
    assert said.startswith(f"error: unknown verb tarin; there are: {', '.join(VERBS)}. ")
    assert "Overrides are written key=value" in said
    assert not trained


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run.steps=3", "--config FILE is missing, for example --config ddp.yaml"),
        ("chaos", "--config FILE is missing, for example --config ddp.yaml"),
        ("--config pdd.yaml", "pdd.yaml: no such file, here or in configs/; nearest is ddp.yaml"),
        ("chaos --config ddp.yaml optimizer.lrr=3", "unknown key; nearest is lr"),
        ("scale ddp", "scale takes one run and --workers, for example: scale ddp --workers 2:8"),
        ("scale --workers 2", "scale takes one run and --workers, for example: scale ddp --workers 2:8"),
        ("scale ddp --workers 3:2", "--workers 3:2: must be MIN:MAX with 1 <= MIN <= MAX"),
        ("doctor one another", "doctor takes one run, for example: doctor ddp"),
        ("verify ddp other", "the verb verify is called compare now"),
        ("config optimiser", "there is no section optimiser; there are: run, cluster"),
        ("config run --schema", "takes no section: config --schema > FILE"),
        ("plan --config ddp.yaml --mtbf soon", '--mtbf soon: must be a count and a unit, such as "30 minutes"'),
        ("status a b", "status takes one run or none"),
        ("status --live --watch", "one of --watch, --live and --json"),
        ("status --live", "--live shows one run: status ddp --live"),
        ("status run --port 8765", "--port is the port of the web page of --live"),
        ("status run --live --cluster FILE", "ssh -L 8765:127.0.0.1:8765 HEAD"),
        ("compare nowhere there", "/nowhere"),
        ("compare a", "compare takes two runs or more, for example: compare ddp other"),
        (
            "--config ddp.yaml 'cluster.env={NOT_SET_ANYWHERE: null}'",
            "cluster.env.NOT_SET_ANYWHERE: is null, and this command's environment has no NOT_SET_ANYWHERE: export it",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_one_message(
    words: str, said: str, capsys: pytest.CaptureFixture[str], trained: list[Config]
) -> None:
    assert said in printed(capsys, *shlex.split(words), code=2).err
    assert not trained


@pytest.mark.parametrize("words", [["doctor", "ddp", "--workers", "2"], ["--config", "ddp.yaml", "--minutes", "2"]])
def test_foreign_option_is_refused(words: list[str], capsys: pytest.CaptureFixture[str], trained: list[Config]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(0.0, words)
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
    assert not trained


def test_a_job_is_the_same_command_without_job(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    job = SimpleNamespace(run_as_job=lambda directory, variables, arguments: given.append(arguments) or 0)
    monkeypatch.setitem(sys.modules, "steadfast.launch.job", job)
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
    code = "import sys; sys.path.insert(0, 'app'); from steadfast.cli import main; sys.exit(main(0.0))"
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


def test_help_version_and_reading_a_config_import_neither_torch_nor_ray() -> None:
    """The help of any verb; in one process, since each takes a while to start."""
    asked = ["--version", "--help", *(f"{verb} --help" for verb in VERBS)]
    code = """
import contextlib, sys
from steadfast.cli import main
from steadfast import Config, load_config

for words in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        main(0.0, words.split())
    print(f"{words}:", [name for name in ("torch", "ray", "pyarrow", "numpy") if name in sys.modules])
"""
    answer = subprocess.run([sys.executable, "-c", code, *asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not [words for words in asked if f"{words}: []\n" not in answer.stdout]


def test_closed_standard_streams_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(0.0, ["config", "optimizer"]) == 0
    for stream in (sys.stdout, sys.stderr):
        stream.fileno()  # Ray's start asks for this
        stream.close()


def test_main_py_puts_its_checkout_first_also_for_the_processes_that_it_starts(tmp_path: Path) -> None:
    other = tmp_path / "steadfast.py"
    other.write_text("raise ImportError('another installed version')")
    shows = "import os, runpy, sys; runpy.run_path(sys.argv[1], run_name='shown'); print(os.environ['PYTHONPATH'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", shows, str(ROOT / "main.py")]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip().split(os.pathsep) == [str(ROOT / "app"), str(tmp_path)]


def test_commands_that_messages_propose_are_there_for_an_installed_user() -> None:
    only_in_a_checkout = re.compile(rf"main\.py ({'|'.join(VERBS)}|{{)|pip install [^\"`]*'\.\[")
    found = []
    for path in sorted((ROOT / "app").rglob("*.py")):
        found += only_in_a_checkout.findall(path.read_text())
    assert not found
