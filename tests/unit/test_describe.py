"""What `config` prints: every key, and YAML that is the defaults."""

from __future__ import annotations

import pytest

from steadfast.cli import main
from steadfast.config import parse_config
from steadfast.config.base import Section
from steadfast.config.describe import SECTIONS, describe
from steadfast.config.schema import Config


def test_what_is_printed_loads_as_the_defaults() -> None:
    assert parse_config(describe(SECTIONS), "run.yaml") == parse_config("", "run.yaml")


def test_every_key_of_every_kind_is_there_with_what_it_means() -> None:
    text = describe(SECTIONS)
    sections = list(Section.__subclasses__())
    for section in sections:
        sections += [each for each in section.__subclasses__() if each not in sections]
        for name, field in section.model_fields.items():
            if section is not Config:
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
    assert main(0.0, ["config", "optimizer"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("optimizer:\n")
    assert "  kind: adamw\n" in text
    assert "  # kind: sgd\n" in text
    assert "model:" not in text


def test_a_section_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(0.0, ["config", "optimiser"]) == 2
    assert "there is no section optimiser; there are: run, cluster" in capsys.readouterr().err
