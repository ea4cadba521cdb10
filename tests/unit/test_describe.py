"""What `config` prints: every key, and YAML that is the defaults."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from steadfast.config import parse_config
from steadfast.config.base import Section
from steadfast.config.describe import SECTIONS, describe, json_schema
from steadfast.config.document import Loader
from steadfast.config.schema import Config
from tests.support.verbs import printed

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_every_key_of_every_kind_is_there_with_what_it_means() -> None:
    text = describe(SECTIONS)
    assert parse_config(text, "run.yaml") == parse_config("", "run.yaml")
    sections = list(Section.__subclasses__())
    for section in sections:
        sections += [each for each in section.__subclasses__() if each not in sections]
        for name, field in section.model_fields.items():
            if section is not Config:
                assert field.description or name == "kind", f"{section.__name__}.{name} does not say what it is"
                assert f"{name}: " in text or f"{name}:\n" in text
            if field.description and _is_shown(section):
                assert " ".join(field.description.split()) in text


def _is_shown(section: type[Section]) -> bool:
    """Whether it is a section of the configuration itself, not one within another, or a base of several."""
    for field in Config.model_fields.values():
        if section in (field.annotation, *getattr(field.annotation, "__args__", ())):
            return True
    return False


def test_one_section_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "config", "optimizer").out
    assert text.startswith("optimizer:\n")
    assert "  kind: adamw\n" in text
    assert "  # kind: sgd\n" in text
    assert "model:" not in text


@cache
def validator() -> Any:
    return jsonschema.Draft202012Validator(json_schema())


def problems(text: str) -> list[str]:
    """Return what the schema says of the text of a configuration file."""
    return [error.message for error in validator().iter_errors(yaml.load(text, Loader))]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_schema_accepts_every_file_of_configs(path: Path) -> None:
    assert not problems(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        describe(SECTIONS),
        "optimizer: {lr: 1.0e-3}",  # without its kind, the section fits several kinds
        "scaling: {num_workers: 2}",
        "cluster: {env: {OMP_NUM_THREADS: 4, WANDB_API_KEY: null}, env_prefixes: NCCL_}",
        "batch: {balance: {A100: 3, T4: 1}}",
        "data: {target: 'mine:Data', order: {target: 'mine:order'}, validation: {target: 'mine:Data'}}",
        "hooks: [{kind: ema}, {target: 'mine:Hook'}]",
    ],
)
def test_the_schema_accepts_what_the_program_accepts(text: str) -> None:
    parse_config(text)
    assert not problems(text)


@pytest.mark.parametrize(
    "text", ["optimiser: {}", "optimizer: {kind: adamv}", "run: {steps: -1}", "batch: {globalsize: 3}", "compile: all"]
)
def test_the_schema_refuses_unknown_keys_and_wrong_values(text: str) -> None:
    assert problems(text)


def test_the_schema_has_the_meaning_of_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "config", "--schema").out)
    assert found == json_schema()
    assert "for any number of workers" in found["$defs"]["BatchConfig"]["properties"]["global_size"]["description"]
