"""Verbs of the command line, in this process."""

from typing import NamedTuple

import pytest

from steadfast.cli import main


class Printed(NamedTuple):
    out: str
    err: str


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Printed:
    """Run a verb, which must end with this code. Return what it has printed."""
    assert main(0.0, [str(word) for word in words]) == code
    return Printed(*capsys.readouterr())
