"""Tracebacks of user code, as the console shows them."""

import json
from collections.abc import Callable
from functools import partial

import pytest

from steadfast.config import Target
from steadfast.config.target import build_target
from steadfast.errors import shortened, traceback_of

FAILS = Target(target="tests.unit.test_errors:fails")


def told_of(call: Callable[[], object]) -> str:
    """Return the traceback of the error that a call raises, and check that the error stays as it was."""
    with pytest.raises(ValueError, match=r"bad|Expecting") as caught:
        call()
    error = caught.value
    before = error.__traceback__.tb_next  # without this function, which has called
    text = traceback_of(error.with_traceback(before))
    assert error.__traceback__ is before
    return text


def test_a_traceback_begins_where_the_users_code_does() -> None:
    text = told_of(partial(build_target, FAILS, "task"))
    assert text.count("File ") == 1
    assert "in fails" in text
    assert text.endswith('raise ValueError("bad")\nValueError: bad')


def fails() -> None:
    raise ValueError("bad")


def test_a_traceback_begins_with_user_code_below_a_library() -> None:
    text = told_of(partial(json.loads, "{}", object_hook=lambda _: build_target(FAILS, "task")))
    assert "json" not in text.splitlines()[1]
    assert "in <lambda>" in text
    assert "in loads" in told_of(partial(json.loads, "{")).splitlines()[1]  # without any code of a user


def test_a_long_traceback_has_twenty_lines_and_says_what_is_missing() -> None:
    text = "\n".join(map(str, range(30)))
    lines = shortened(text).splitlines()
    assert len(lines) == 20
    assert lines[8] == "  ... 11 lines left out, which -v shows"
    assert (lines[:8], lines[9:]) == ([str(each) for each in range(8)], [str(each) for each in range(19, 30)])
    assert shortened("\n".join(lines)) == "\n".join(lines)
