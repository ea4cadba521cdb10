"""The environment of a run: versions, processors, and the commit of the working tree."""

import json
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from steadfast.telemetry.environment import environment


def test_environment_is_plain_json_and_survives_outside_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = json.loads(json.dumps(environment(tmp_path)))
    assert seen["git"] is None
    assert torch.__version__.startswith(seen["torch"].split("+")[0])
    assert seen["num_cpus"] >= 1

    def version(name: str) -> str:
        if name == "ray":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("steadfast.telemetry.environment.version", version)
    seen = environment(tmp_path)
    assert (seen["torch"], seen["ray"]) == ("1.0", None)  # where Ray is not installed


def test_environment_knows_a_changed_working_tree(tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    tracked = tmp_path / "code.py"
    tracked.write_text("1")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.jsonl").write_text("")
    clean = environment(tmp_path)["git"]
    tracked.write_text("2")
    assert len(clean) == 40
    assert environment(tmp_path)["git"] == f"{clean}-dirty"
