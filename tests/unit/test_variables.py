"""Variables that workers get from the command, and whose values nobody else may see."""

import os
import pickle
import stat
import subprocess
from pathlib import Path

import pytest
from ray import cloudpickle

from steadfast.config import ClusterConfig
from steadfast.config.variables import given_variables, taken_variables
from steadfast.errors import ConfigError
from steadfast.launch.handover import source_and_delete, write_variables
from steadfast.orchestration.runtime_env import runtime_env

HERE = {"TOKEN": "secret", "AWS_REGION": "here", "NCCL_DEBUG": "INFO", "HOME": "/root", "MY_NCCL_DEBUG": "1"}


def test_workers_get_what_is_named_and_what_begins_so() -> None:
    cluster = ClusterConfig(env={"TOKEN": None, "THREADS": "2", "AWS_REGION": "there"})
    assert given_variables(cluster) == {"THREADS": "2", "AWS_REGION": "there"}
    assert taken_variables(cluster, HERE) == {"TOKEN": "secret", "NCCL_DEBUG": "INFO"}
    assert taken_variables(ClusterConfig(env_prefixes=()), HERE) == {}


def test_all_that_are_missing_are_one_error() -> None:
    cluster = ClusterConfig(env={"TOKEN": None, "NO": None, "NEITHER": None})
    with pytest.raises(ConfigError) as caught:
        taken_variables(cluster, HERE)
    first, second = str(caught.value).splitlines()
    assert first == "cluster.env.NO: is null, and this command's environment has no NO: export it, or give a value here"
    assert second.startswith("cluster.env.NEITHER: ")


def test_a_shell_takes_variables_from_a_file_that_is_gone_then(tmp_path: Path) -> None:
    value = 'it\'s "$HOME" `x`\nand a line'
    file = write_variables({"A": value, "B": ""})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    shown = subprocess.run(
        ["sh", "-c", f"{source_and_delete(str(file))}exec printenv A B"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == f"{value}\n\n"
    assert not file.exists()


def test_ray_is_told_of_secrets_only_what_nobody_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HERE.items():
        monkeypatch.setenv(name, value)
    found = runtime_env(ClusterConfig(env={"TOKEN": None, "THREADS": "2"}))
    hook = cloudpickle.dumps(found.pop("worker_process_setup_hook"))
    assert found["env_vars"] == {"THREADS": "2"}
    assert "secret" not in str(found)
    monkeypatch.delenv("TOKEN")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    pickle.loads(hook)()  # as a worker does
    assert (os.environ["TOKEN"], os.environ["NCCL_DEBUG"]) == ("secret", "INFO")
