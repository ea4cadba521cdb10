"""A command that comes back: what its next process is told, and when there is no use in it."""

import os
import socket
import subprocess
import sys

import pytest

from steadfast.errors import TrainingError, UsageError
from steadfast.launch.again import Comebacks

PROGRAM = """
import sys
from steadfast.launch.again import Comebacks
before = Comebacks.of_this_process()
print(before.restarts_without_progress, before.last_step, before.num_workers, sys.argv[1:], flush=True)
if before.restarts_without_progress < 2:
    before.after("Ray", 7, (1, 2) if before.restarts_without_progress == 0 else None).come_back()
print(before.token)
"""


def test_the_next_process_is_the_same_one_with_the_same_words_and_knows_of_the_last() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, "a b", "c"], capture_output=True, text=True, check=True)
    *lines, token = ended.stdout.splitlines()
    words = "['a b', 'c']"
    assert lines == [f"0 0 None {words}", f"1 7 (1, 2) {words}", f"2 7 (1, 2) {words}"]
    assert len(token) == 32


def test_a_new_step_between_two_begins_the_count_anew_and_a_wish_to_stop_stays() -> None:
    first = Comebacks().after("Ray", 5, stopping=True)
    assert first.after("Ray", 5).restarts_without_progress == 2
    assert first.after("Ray", 6).restarts_without_progress == 1
    assert first.after("Ray", 6).token == first.token
    assert first.after("Ray", 5).stopping


def test_one_that_has_come_back_too_often_says_what_has_died_and_what_to_do() -> None:
    twice = Comebacks().after("Ray's GCS", 5).after("Ray's GCS", 5)
    twice.check(2)
    with pytest.raises(TrainingError, match=r"Ray's GCS has died 2 times and no step beyond 5; recovery allows 1"):
        twice.check(1)


def test_a_cluster_that_does_not_answer_is_told_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        Comebacks(cluster=address).check(0)
    with pytest.raises(TrainingError, match=r"Start its Ray again .* then give the same command again"):
        Comebacks(cluster=address).check(0)
    Comebacks().check(0)
    assert "STEADFAST_CAME_BACK" not in os.environ


@pytest.mark.parametrize("text", ["garbage", "5", "[]", '{"no_such_field": 1}'])
def test_a_record_that_another_program_wrote_is_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADFAST_CAME_BACK", text)
    with pytest.raises(UsageError, match=r"^STEADFAST_CAME_BACK=.*unset it"):
        Comebacks.of_this_process()
