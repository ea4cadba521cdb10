"""docs/migrate, docs/defaults.md and docs/does_not_fit.md say what their programs and the configuration are."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from steadfast.config import Config, parse_config
from tests.documents import DOCS
from tests.documents.reference import reference_page

PROGRAMS = DOCS.parent / "tests/examples/migrate"
PAGES = sorted((DOCS / "migrate").glob("*.md"))
DEFAULTS = DOCS / "defaults.md"
ATTRIBUTES = {"model.training", "run.log", "run.rank"}  # of the arguments of a task and of a hook, and no keys


def blocks(page: Path) -> list[str]:
    """Return the programs and configurations on a page."""
    return re.findall(r"```(?:python|yaml)\n(.*?)```", page.read_text(), flags=re.DOTALL)


def page_of(program: str) -> str:
    """Return the name of the page with this program, such as ddp for ddp_before.py."""
    others = {"hugging_face": "hugging_face_trainer", "ray": "ray_train", "lightning_module.py": "lightning"}
    return others.get(program, program)


@pytest.mark.parametrize("page", [*PAGES, DOCS / "does_not_fit.md"], ids=lambda page: page.stem)
def test_each_program_on_a_page_is_a_file_that_the_tests_run(page: Path) -> None:
    files = {path.read_text(): path.name for path in PROGRAMS.iterdir() if path.is_file()}
    names = [files.get(block, f"in no file of {PROGRAMS}: {block}") for block in blocks(page)]
    expected = ["two_optimizers.py"]
    if page in PAGES:
        expected = [name for name in files.values() if page_of(re.sub(r"_(before|after)\..*", "", name)) == page.stem]
    assert sorted(names) == sorted(expected)


def test_each_program_for_another_trainer_has_one_for_steadfast() -> None:
    before = {path.stem.removesuffix("_before") for path in PROGRAMS.glob("*_before.py")}
    after = {path.stem.removesuffix("_after") for path in PROGRAMS.glob("*_after.py")}
    assert before == after
    assert {page.stem for page in PAGES} == set(map(page_of, before))
    for path in PROGRAMS.glob("*.py"):
        compile(path.read_text(), path.name, "exec")
    config = parse_config((PROGRAMS / "ray_after.yaml").read_text(), "ray_after.yaml")
    assert config.scaling.num_workers == (1, 2)
    assert config.targets()["data.validation.target"] == "ray_after:test_set"


@cache
def keys() -> set[str]:
    """Return every key, with its section."""
    found: set[str] = set()
    section = ""
    for line in reference_page().splitlines():
        if heading := re.match(r"#+ `([\w.]+)`", line):
            section = heading[1]
            found |= {section, f"{section}.kind"}
        elif row := re.match(r"\| `(\w+)` \|", line):
            found.add(f"{section}.{row[1]}")
    return found


@pytest.mark.parametrize("page", [*PAGES, DEFAULTS, DOCS / "does_not_fit.md"], ids=lambda page: page.stem)
def test_keys_that_a_page_names_are_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text)
    sections = set(Config.model_fields)
    wrong = {name for name in named if name.partition(".")[0] in sections} - keys() - ATTRIBUTES
    assert not wrong


def rows() -> list[tuple[str, str, str]]:
    """Return the key, the default and the value of a plain loop of each row of docs/defaults.md that has a key."""
    found: list[tuple[str, str, str]] = []
    for line in DEFAULTS.read_text().splitlines():
        if line.startswith("| "):
            _, _, key, default, plain = (cell.strip() for cell in line.split("|")[1:-1])
            if "`" in key:
                found.append((key, default, plain))
    return found


def value(cell: str) -> Any:
    """Return the value between the first backquotes of a cell."""
    found = re.search(r"`([^`]+)`", cell)
    assert found, cell
    return yaml.safe_load(found[1])


def looked_up(config: Config, key: str) -> Any:
    found: Any = config.model_dump(mode="json", exclude_none=False)
    for part in key.split("."):
        found = found[part]
    return found


def plain_loop() -> Config:
    (block,) = blocks(DEFAULTS)
    return parse_config(block, "plain.yaml")


def test_the_page_of_defaults_has_rows() -> None:
    assert len(rows()) > 20


@pytest.mark.parametrize(("key", "default", "plain"), rows(), ids=lambda cell: cell)
def test_a_default_on_the_page_is_that_of_the_schema(key: str, default: str, plain: str) -> None:
    kind = re.search(r"\((\w+)\)", key)
    words = [f"optimizer.kind={kind[1]}"] if kind else []
    name = value(key)
    assert looked_up(parse_config("", "defaults.yaml", words), name) == value(default)
    if "`" in plain and not kind:
        found = looked_up(plain_loop(), name)
        if name == "optimizer.groups":
            found = [{field: group[field] for field in ("match", "weight_decay")} for group in found]
        assert found == value(plain)
