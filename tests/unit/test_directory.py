"""The directory of a run on storage."""

from pathlib import Path

import pytest

from steadfast.errors import ConfigError, StorageError
from steadfast.run.directory import KillRequest, RunDirectory
from steadfast.storage import LocalStore


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(LocalStore(tmp_path / "run"))


def test_a_folder_in_which_something_lies_is_not_new(directory: RunDirectory) -> None:
    assert directory.check_writable()
    directory.store.commit("model.safetensors", b"x")
    assert not directory.check_writable()


def test_a_node_that_does_not_see_the_run_says_so_unless_storage_refuses(
    directory: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=r"does not see .*run"):
        directory.check_shared()
    (tmp_path / "run" / "owner.json").mkdir(parents=True)
    directory.check_shared()


def test_requests_are_read_once_and_those_that_are_being_written_later(directory: RunDirectory, tmp_path: Path) -> None:
    names = [directory.request_kill(rank) for rank in (1, 1)]
    half = tmp_path / "run" / "requests" / f".{names[0]}.host-7"
    half.write_text('{"kill"')
    assert directory.pop_requests() == [KillRequest(name, 1) for name in names]
    assert directory.pop_requests() == []
    assert half.exists()


def test_summary_that_storage_refuses_names_its_file_and_a_remedy(directory: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "run" / "summary.json" / "in the way").mkdir(parents=True)
    with pytest.raises(
        StorageError, match=r"summary\.json cannot be written: .*\. Make room or remove what is in the way"
    ):
        directory.write_summary({"status": "finished", "step": 1, "metrics": {}})


def test_stored_configuration_with_renamed_and_removed_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "run: {exact: true}\nrecovery: {stall_s: 7, mode: auto}\naudit: {recompute: 5 steps}\n"
        "profile: {shapes: false}\n"
    )
    config = RunDirectory(LocalStore(tmp_path)).stored_config()
    assert config is not None
    assert config.recovery.hang_limit_s == 7
    assert str(config.recompute.every) == "5 steps"


def test_stored_configuration_with_another_value_of_a_removed_key_that_changes_results_is_refused(
    tmp_path: Path,
) -> None:
    written = "run: {seed: 7}\ndata: {prefetch_factor: 3}\ntrackers: [{kind: wandb, tags: [], mode: auto}]\n"
    (tmp_path / "config.yaml").write_text(written + "schedule: {kind: one_cycle, rising_fraction: 0.3}\n")
    config = RunDirectory(LocalStore(tmp_path)).stored_config()
    assert config is not None
    assert config.run.seed == 7
    (tmp_path / "config.yaml").write_text(written + "schedule: {kind: one_cycle, rising_fraction: 0.4}\n")
    with pytest.raises(
        ConfigError, match=r"4: schedule.rising_fraction: unknown key; the key was removed, .* always 0.3"
    ):
        RunDirectory(LocalStore(tmp_path)).stored_config()
