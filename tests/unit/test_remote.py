"""Commands that run elsewhere, and what a machine knows of where it is."""

import subprocess
from pathlib import Path

import pytest
from ray.job_submission import JobDetails

from steadfast.cli import main
from steadfast.errors import TrainingError
from steadfast.launch import remote
from steadfast.launch.job import exit_code
from steadfast.launch.remote import _BEGINS, _ENDS, _show
from steadfast.orchestration.cluster import startable
from steadfast.world.groups import interface_of

PACKAGE = Path(remote.__file__).parents[1]


def test_addresses_lead_to_interfaces_and_the_autoscalers_node_types_are_counted(tmp_path: Path) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") is None
    config = tmp_path / "config.yaml"
    config.write_text(
        "head_node_type: head\n"
        "available_node_types:\n"
        "  head: {resources: {CPU: 0}, max_workers: 1}\n"
        "  big: {resources: {CPU: 8, GPU: 1}, max_workers: 2}\n"
        "  none: {resources: {CPU: 1}}\n"
    )
    assert startable(config) == [{"CPU": 8, "GPU": 1}] * 2, "without the head"
    assert startable(tmp_path / "there is none") == []


@pytest.mark.parametrize(
    ("status", "driver_exit_code", "expected"),
    [("SUCCEEDED", 0, 0), ("FAILED", 2, 2), ("STOPPED", None, 3)],
)
def test_a_job_ends_with_the_exit_code_of_its_command(status: str, driver_exit_code: int | None, expected: int) -> None:
    info = JobDetails(type="SUBMISSION", status=status, entrypoint="", driver_exit_code=driver_exit_code)
    assert exit_code(info) == expected


@pytest.mark.parametrize("driver_exit_code", [-9, None])
def test_a_job_that_was_killed_is_reported_with_what_to_do(driver_exit_code: int | None) -> None:
    message = (
        "Job entrypoint command failed with exit code -9, last available logs (truncated to 20,000 chars):\nstep 10"
    )
    info = JobDetails(
        type="SUBMISSION", status="FAILED", entrypoint="", driver_exit_code=driver_exit_code, message=message
    )
    with pytest.raises(TrainingError, match=r"^the job was killed \(.* exit code -9\)\. The same command resumes"):
        exit_code(info)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "ddp.yaml", "--cluster", "nowhere.yaml"], "--cluster nowhere.yaml: there is no such file"),
        (["--config", "ddp.yaml", "optimizer.lr=x", "--cluster", "nowhere.yaml"], "optimizer.lr"),
        (["compare", "a", "b", "--html", "x", "--cluster", "nowhere.yaml"], "--html x would be written on the head"),
        (
            ["--config", "ddp.yaml", "--cluster", "cluster/aws.yaml"],
            "--cluster cluster/aws.yaml: Ray needs boto3 to reach aws; pip install 'steadfast[cluster]'",
        ),
    ],
)
def test_a_command_for_a_cluster_is_checked_before_it_goes_anywhere(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "find_spec", lambda name: None)  # boto3 is not here
    assert main(0.0, arguments) == 2
    assert said in capsys.readouterr().err


def test_what_runs_on_the_head_is_the_command_less_where(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    run_on_head = "steadfast.launch.remote.run_on_head"
    monkeypatch.setattr(run_on_head, lambda cluster, arguments, *_: given.append(arguments) or 0)
    for words in (["--cluster", "c.yaml"], ["--cluster=c.yaml"]):
        assert main(0.0, ["--config", "ddp.yaml", *words, "run.name=c.yaml"]) == 0
        assert main(0.0, ["scale", "ddp", "--workers", "2:4", *words]) == 0
    train, scale = ["--config", "ddp.yaml", "run.name=c.yaml", "--job"], ["scale", "ddp", "--workers", "2:4"]
    assert given == [train, scale] * 2


@pytest.mark.parametrize(
    ("started_as", "terminal", "copied", "typed"),
    [
        ("main.py", True, ["./ ~/steadfast/"], "python main.py audit ddp"),
        (
            "/usr/bin/steadfast",
            False,
            ["./ ~/steadfast/", f"{PACKAGE}/ ~/steadfast/steadfast/"],
            "TERM=dumb python -m steadfast audit ddp",
        ),
    ],
)
def test_the_head_runs_main_py_of_a_checkout_or_a_copy_of_the_installed_package(
    started_as: str, terminal: bool, copied: list[str], typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[str] = []
    commands: list[list[str]] = []
    monkeypatch.setattr("sys.argv", [started_as])
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setattr(remote, "_copy", lambda cluster, *places: copies.append(" ".join(places)))
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    monkeypatch.setattr(remote, "_show", lambda *_: 0)
    (tmp_path / "c.yaml").write_text("provider: {type: other}")
    assert remote.run_on_head(str(tmp_path / "c.yaml"), ["audit", "ddp"], False, {}) == 0
    assert copies == copied
    assert commands[0][-1] == f"echo {_BEGINS}; cd ~/steadfast && {typed}; echo {_ENDS} $?"


REACHED = f"ssh: hello\n{_BEGINS}\nstep 1\n\033[0m{_ENDS} 3\nShared connection closed.\n"


@pytest.mark.parametrize(
    ("text", "verbose", "code", "out", "err"),
    [
        (REACHED, False, 3, "step 1\n", ""),
        (REACHED, True, 3, "ssh: hello\nstep 1\nShared connection closed.\n", ""),
        (f"ssh: hello\n{_BEGINS}\nstep 1\nbroken pipe\n", False, None, "step 1\nbroken pipe\n", ""),
        ("ssh: no route to host\n", False, None, "", "ssh: no route to host\n"),
        ("ssh: no route to host\n", True, None, "ssh: no route to host\n", ""),
    ],
)
def test_what_ssh_says_is_shown_where_it_explains_why_the_command_was_not_reached(
    text: str, verbose: bool, code: int | None, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["printf", "%s", text], stdout=subprocess.PIPE, text=True) as remote:
        assert _show(remote, verbose) == code
    assert capsys.readouterr() == (out, err)
