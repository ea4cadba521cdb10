"""A run's folder may hold what is not the run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import parse_config
from app.errors import StorageError
from app.launch.resume import start_or_resume
from app.run.directory import RunDirectory
from app.run.events import RunStarted
from app.storage import LocalStore
from tests.events import event_lines

BEGUN = RunStarted(time_s=0.0, launcher="ray")
CONFIG = """
model: {kind: mlp, in_features: 4, hidden: [3], out_features: 2}
task: {kind: classification}
data: {target: 'tests.examples.digits:dataset'}
"""


def nothing(line: str) -> None:
    pass


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(LocalStore(tmp_path / "run"))


def test_a_folder_in_which_something_lies_is_not_new(directory: RunDirectory) -> None:
    assert directory.check_writable()
    directory.store.commit("model.safetensors", b"x")
    assert not directory.check_writable()


def test_another_run_begun_in_the_same_folder_takes_nothing_of_others_along(directory: RunDirectory) -> None:
    directory.check_writable()
    directory.store.commit("model.safetensors", b"x")
    start_or_resume(parse_config(f"{CONFIG}\nrun: {{seed: 1}}"), directory, BEGUN, nothing)
    start_or_resume(parse_config(f"{CONFIG}\nrun: {{seed: 2}}"), directory, BEGUN, nothing)
    assert directory.store.read("model.safetensors") == b"x"
    assert [event["event"] for event in event_lines(directory)] == ["run_started"]


def test_a_configuration_that_cannot_be_read_is_not_taken_for_none(directory: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"config.yaml cannot be read"):
        directory.stored_config()


def test_a_node_that_does_not_see_the_run_says_so_unless_storage_refuses(
    directory: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=r"does not see .*run"):
        directory.check_shared()
    (tmp_path / "run" / "owner.json").mkdir(parents=True)
    directory.check_shared()


@pytest.mark.parametrize(("steps", "goes_on"), [(100, False), (200, True), (70, True)])
def test_a_run_that_a_hook_has_ended_is_finished_until_another_length_is_asked_for(
    directory: RunDirectory, steps: int, goes_on: bool
) -> None:
    directory.check_writable()
    said: list[str] = []
    assert start_or_resume(parse_config("run: {steps: 100}"), directory, BEGUN, said.append)
    summary = {"status": "finished", "step": 60, "metrics": {}, "ended_early": "loss has not been better than 2.1"}
    directory.write_summary(summary)
    again = parse_config(f"run: {{steps: {steps}}}")
    assert start_or_resume(again, directory, BEGUN, said.append) == goes_on
    if not goes_on:
        assert said[-1].startswith(f"{directory.uri} has finished: 60 steps | loss has not been better than 2.1")
