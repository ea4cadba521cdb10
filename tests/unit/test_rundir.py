"""A run's folder may hold what is not the run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.config import parse_config
from app.errors import StorageError
from app.rundir import RunDirectory, begin
from app.storage import LocalStore

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
    assert directory.create()
    directory.store.commit("model.safetensors", b"x")
    assert not directory.create()


def test_another_run_begun_in_the_same_folder_takes_nothing_of_others_along(directory: RunDirectory) -> None:
    directory.create()
    directory.store.commit("model.safetensors", b"x")
    begin(parse_config(f"{CONFIG}\nrun: {{seed: 1}}"), directory, "ray", 0.0, nothing)
    begin(parse_config(f"{CONFIG}\nrun: {{seed: 2}}"), directory, "ray", 0.0, nothing)
    assert directory.store.read("model.safetensors") == b"x"
    assert [event["event"] for event in directory.read_events()] == ["run_started"]


def test_a_configuration_that_cannot_be_read_is_not_taken_for_none(directory: RunDirectory) -> None:
    (directory.store.path / "config.yaml").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"config.yaml cannot be read"):
        directory.stored_config()


def test_a_node_that_does_not_see_the_run_says_so_unless_storage_refuses(
    directory: RunDirectory,
) -> None:
    with pytest.raises(StorageError, match=r"does not see .*run"):
        directory.check_shared()
    (directory.store.path / "owner.json").mkdir(parents=True)
    directory.check_shared()
