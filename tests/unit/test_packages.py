"""Packages for workers: a layer above what their node has."""

import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from steadfast.errors import ConfigError, UsageError
from steadfast.orchestration import packages
from steadfast.orchestration.packages import check_packages, install_packages
from tests.support.wheels import write_wheel


def test_a_node_installs_once_and_again_what_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(sys.path))
    torch = version("torch")
    write_wheel(tmp_path, "of_the_user", "x = 1", requires="torch")  # which the node has: there is nothing to download
    (tmp_path / "needs.txt").write_text("--no-index\n./of_the_user-1.0-py3-none-any.whl\n")
    entries = ("needs.txt", "of_the_user-1.0-py3-none-any.whl")
    layers = tmp_path / "layers"
    install_packages(entries, tmp_path, layers)
    assert importlib.import_module("of_the_user").x == 1
    assert (version("of_the_user"), version("torch")) == ("1.0", torch)
    assert not list(layers.glob("*/venv/lib/*/site-packages/torch"))

    with monkeypatch.context() as patch:
        patch.setattr(packages, "_install", lambda *_: pytest.fail("it has been installed"))
        install_packages(entries, tmp_path, layers)

    write_wheel(tmp_path, "of_the_user", "x = 2")
    del sys.modules["of_the_user"]
    monkeypatch.setattr("sys.path", [place for place in sys.path if str(layers) not in place])
    install_packages(entries, tmp_path, layers)
    assert importlib.import_module("of_the_user").x == 2
    del sys.modules["of_the_user"]


def test_what_pip_says_is_told(tmp_path: Path) -> None:
    (tmp_path / "needs.txt").write_text("--no-index\nnot-there\n")
    with pytest.raises(
        UsageError, match=r"(?s)cluster\.pip cannot be installed on .*No matching distribution.*not-there"
    ):
        install_packages(("needs.txt",), tmp_path, tmp_path / "layers")


@pytest.mark.parametrize(
    ("entry", "why"), [("../other.whl", "not in the working"), ("./no", "not in the working"), ("d/x.whl", "by git")]
)
def test_packages_that_would_not_reach_the_nodes_are_refused(tmp_path: Path, entry: str, why: str) -> None:
    (tmp_path / "other.whl").touch()
    project = tmp_path / "project"
    (project / "d").mkdir(parents=True)
    (project / "d" / "x.whl").touch()
    (project / ".gitignore").write_text("d\n")
    (project / "y.whl").touch()
    subprocess.run(["git", "init", "-q", project], check=True)
    check_packages(("einops", "git+https://host/x.git", "y.whl", "--no-deps"), project)
    with pytest.raises(ConfigError, match=rf"cluster\.pip\.1: {entry} is .*{why}"):
        check_packages(("einops", entry), project)
