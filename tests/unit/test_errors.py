"""Tracebacks of user code, as the console shows them."""

from __future__ import annotations

import json

import pytest

from steadfast.config import Target
from steadfast.config.target import build_target
from steadfast.errors import shortened, traceback_of


def test_a_traceback_begins_where_the_users_code_does() -> None:
    with pytest.raises(ValueError, match="bad") as caught:
        build_target(Target(target="tests.unit.test_errors:fails"), "task")
    error = caught.value
    assert error.__traceback__ is not None
    text = traceback_of(error.with_traceback(error.__traceback__.tb_next))  # without this test, which has called
    assert text.count("File ") == 1
    assert "in fails" in text
    assert text.endswith('raise ValueError("bad")\nValueError: bad')


def fails() -> None:
    raise ValueError("bad")


def test_a_traceback_begins_with_user_code_below_a_library() -> None:
    with pytest.raises(ValueError, match="bad") as caught:
        json.loads("{}", object_hook=lambda _: build_target(Target(target="tests.unit.test_errors:fails"), "task"))
    error = caught.value
    assert error.__traceback__ is not None
    text = traceback_of(error.with_traceback(error.__traceback__.tb_next))
    assert "json" not in text.splitlines()[1]
    assert "in <lambda>" in text


def test_an_error_of_a_library_begins_with_its_first_frame() -> None:
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    error = caught.value
    assert error.__traceback__ is not None
    assert "in loads" in traceback_of(error.with_traceback(error.__traceback__.tb_next)).splitlines()[1]


def test_a_long_traceback_has_twenty_lines_and_says_what_is_missing() -> None:
    text = "\n".join(map(str, range(30)))
    lines = shortened(text).splitlines()
    assert len(lines) == 20
    assert lines[8] == "  ... 11 lines left out, which -v shows"
    assert (lines[:8], lines[9:]) == ([str(each) for each in range(8)], [str(each) for each in range(19, 30)])
    assert shortened("\n".join(lines)) == "\n".join(lines)


def test_a_traceback_leaves_the_error_as_it_was() -> None:
    with pytest.raises(ValueError, match="bad") as caught:
        build_target(Target(target="tests.unit.test_errors:fails"), "task")
    before = caught.value.__traceback__
    traceback_of(caught.value)
    assert caught.value.__traceback__ is before
