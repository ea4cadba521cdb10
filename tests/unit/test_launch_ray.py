"""Ray that does not come up: told in one message, and tried again only by a command that has come back."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ray._private import ray_constants

from steadfast.cli import main
from steadfast.config import Config, parse_config
from steadfast.errors import TrainingError, UsageError
from steadfast.launch import ray as subject
from steadfast.launch.again import Comebacks
from steadfast.orchestration import cluster
from steadfast.run.interrupts import Interrupts

TIMED_OUT = "The current node timed out during startup. This could happen because the GCS has become overloaded.\nmore"


@pytest.fixture
def config() -> Config:
    return parse_config("{run: {name: run}, cluster: {address: local}}", "run.yaml", [])


def refuse(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_RAY_SETTINGS", {})
    monkeypatch.setattr(cluster, "silence_raylet", Mock())
    monkeypatch.setattr(cluster, "keep_sigterm_handler", Mock())
    monkeypatch.setattr("ray.init", Mock(side_effect=error))


def connect_with(error: Exception, config: Config, before: Comebacks, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(error, monkeypatch)
    monkeypatch.setattr(subject, "import_module", Mock())  # its thread would outlive the test
    launching = subject._Launch(config, Mock(), Mock(), Mock(verbose=False), Interrupts(), before)
    launching._connect(0.0)


def test_it_is_told_with_rays_words_and_what_to_do(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"^Ray cannot be started: The current node .* overloaded\. If Ray timed out, give the same command"
    with pytest.raises(TrainingError, match=told) as raised:
        connect_with(Exception(TIMED_OUT), config, Comebacks(), monkeypatch)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (FileNotFoundError(2, "No such file", "/proc/1/.ray"), "set HOME to a folder"),
        (PermissionError(13, "Permission denied", "/proc"), "set HOME to a folder"),
        (OSError(30, "Read-only file system", "/short/ray/session_1"), "write /short/ray: set RAY_TMPDIR"),
        (RuntimeError("Could not determine home directory."), "set HOME to a folder"),
        (OSError("AF_UNIX path length cannot exceed 107 bytes: /long"), "set RAY_TMPDIR=/tmp"),
        (FutureWarning("a name will change"), "remove the filter .PYTHONWARNINGS"),
        (OSError(98, "Address already in use"), "If Ray timed out"),
    ],
)
def test_ray_that_does_not_start_is_reported_with_a_remedy_for_its_cause(
    error: Exception, remedy: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/proc/1")
    monkeypatch.setenv("RAY_TMPDIR", "/short")
    with pytest.raises(TrainingError, match=remedy):
        connect_with(error, config, Comebacks(), monkeypatch)


@pytest.mark.parametrize("free", [{"f_bavail": 3}, {"f_favail": 9}])
def test_command_does_not_start_ray_without_room_for_its_sockets_and_logs(
    free: dict[str, int], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"f_bavail": 10**9, "f_frsize": 4096, "f_files": 10**9, "f_favail": 10**9} | free
    monkeypatch.setattr("os.statvfs", lambda folder: SimpleNamespace(**there))
    with pytest.raises(TrainingError, match=r"has room for .* set RAY_TMPDIR to a folder with space"):
        connect_with(AssertionError(), config, Comebacks(), monkeypatch)


@pytest.mark.parametrize(("given", "through_uv"), [(None, False), ("1", True)])
def test_embedded_ray_starts_workers_without_uv_run_unless_the_user_asks(
    given: str | None, through_uv: bool, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV", True)
    if given:
        monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", given)
    with pytest.raises(TrainingError):
        connect_with(Exception(TIMED_OUT), config, Comebacks(), monkeypatch)
    assert through_uv == ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV


def test_a_cluster_that_answers_and_refuses_is_told_with_its_address_and_the_token(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "find_cluster", Mock(return_value="192.0.2.1:6379"))
    told = r"^Ray at 192\.0\.2\.1:6379 answers, but cannot be joined: Failed to connect\. .* RAY_AUTH_MODE=token .*-v"
    with pytest.raises(TrainingError, match=told) as raised:
        connect_with(ConnectionError("Failed to connect"), config, Comebacks(), monkeypatch)
    assert "busy" not in str(raised.value)


def test_what_has_a_remedy_of_its_own_is_told_as_it_is(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_cluster", Mock(side_effect=UsageError("no Ray answers there")))
    for before in (Comebacks(), Comebacks().after("Ray", 3)):
        with pytest.raises(UsageError, match=r"^no Ray answers there$"):
            connect_with(Exception(TIMED_OUT), config, before, monkeypatch)


def test_a_command_that_came_back_tries_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    came_back = Mock(side_effect=SystemExit)
    monkeypatch.setattr(Comebacks, "come_back", came_back)
    with pytest.raises(SystemExit):
        connect_with(Exception(TIMED_OUT), config, Comebacks().after("Ray", 3), monkeypatch)
    came_back.assert_called_once()


@pytest.mark.parametrize("words", [[], ["--json"], ["--verbose"]])
def test_doctor_tells_it_as_a_finding(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(Exception(TIMED_OUT), monkeypatch)
    assert main(0.0, ["doctor", "--config", "ddp.yaml", "cluster.address=local", *words]) == 1
    printed = capsys.readouterr()
    assert ("Traceback" in printed.err) == (words == ["--verbose"])
    if words == ["--json"]:
        (finding,) = json.loads(printed.out)["findings"]
        assert (finding["level"], finding["check"]) == ("error", "cluster")
        assert finding["what"].endswith("because the GCS has become overloaded")
        assert finding["remedy"].startswith("If Ray timed out")
    else:
        assert "error    cluster: Ray cannot be started: The current node timed out" in printed.out
        assert "give the same command again" in printed.out
        assert printed.out.endswith("\n1 error, 0 warnings\n")
