"""`init`: the starter is whole, loads, trains, and overwrites nothing."""

import json
import re
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

from steadfast import fit
from steadfast.cli import main
from steadfast.commands.init import starter
from steadfast.config import load_config
from steadfast.config.describe import json_schema

ROOT = Path(__file__).parents[2]
FILES = {"train.yaml", "train.schema.json", "mine.py", "cluster.yaml"}


def test_init_writes_a_starter_that_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my run"
    assert main(0.0, ["init", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == FILES
    assert capsys.readouterr().out.endswith(f"\n  cd '{folder}' && steadfast --config train.yaml\n")

    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    few = ["run.epochs=null", "run.steps=3", "validation.every=2 steps", "run.report=false"]
    result = fit(load_config("train.yaml", ["scaling.num_workers=1", "trackers=[]", *few]))
    del sys.modules["mine"]  # other tests have a module of this name
    assert result.summary["step"] == 3
    assert result.summary["metrics"].keys() == {"loss", "accuracy"}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    capsys.readouterr()
    assert main(0.0, ["init"]) == 0
    assert capsys.readouterr().out.endswith(":\n  steadfast --config train.yaml\n")


def test_init_overwrites_nothing_and_names_all_existing_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("mine")
    (tmp_path / "train.yaml").write_text("mine")
    assert main(0.0, ["init", str(tmp_path)]) == 2
    assert f"error: {tmp_path} already has mine.py, train.yaml; init overwrites no file" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"mine.py": "mine", "train.yaml": "mine"}
    assert main(0.0, ["init", str(tmp_path / "mine.py" / "folder")]) == 2
    assert "cannot be written: Not a directory; choose another folder" in capsys.readouterr().err


def test_init_writes_through_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").symlink_to(tmp_path / "elsewhere")
    assert main(0.0, ["init", str(tmp_path)]) == 2
    assert f"error: {tmp_path} already has mine.py; init overwrites no file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"], "the link leads nowhere still"


def test_the_starter_names_its_schema_in_the_first_line() -> None:
    files = starter()
    first = files["train.yaml"].splitlines()[0]
    assert json.loads(files[first.removeprefix("# yaml-language-server: $schema=")]) == json_schema()
    jsonschema.validate(yaml.safe_load(files["train.yaml"]), json_schema())


def test_the_starters_cluster_file_is_valid_and_installs_all_dependencies() -> None:
    text = starter()["cluster.yaml"]
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    found = yaml.safe_load(text)
    jsonschema.validate(found, schema)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    # The job of `--cluster` needs the packages of Ray's dashboard too.
    wanted = {each.replace("ray[train]", "ray[default,train]") for each in wanted}
    matched = re.search(r"pip install -q (.*?);", found["setup_commands"][0])
    assert matched
    assert {each.strip("'") for each in matched[1].split()} == wanted
