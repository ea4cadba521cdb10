"""A command that comes back: what its next process is told, and when there is no use in it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from app.errors import TrainingError
from app.launch.again import Comebacks

PROGRAM = """
import sys
from app.launch.again import Comebacks
before = Comebacks.of_this_process()
print(before.in_a_row, before.furthest_step, before.num_workers, sys.argv[1:], flush=True)
if before.in_a_row < 2:
    before.after(step=7, num_workers=(1, 2) if before.in_a_row == 0 else None, cluster="").come_back()
print(before.token)
"""


def test_the_next_process_is_the_same_one_with_the_same_words_and_knows_of_the_last() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, "a b", "c"], capture_output=True, text=True, check=True)
    *lines, token = ended.stdout.splitlines()
    words = "['a b', 'c']"
    assert lines == [f"0 0 None {words}", f"1 7 (1, 2) {words}", f"2 7 (1, 2) {words}"]
    assert len(token) == 32


def test_a_new_step_between_two_begins_the_count_anew() -> None:
    first = Comebacks().after(5, None, "")
    assert first.after(5, None, "").in_a_row == 2
    assert first.after(6, None, "").in_a_row == 1
    assert first.after(6, None, "").token == first.token


def test_a_cluster_that_does_not_answer_is_told_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        Comebacks(cluster=address).check_cluster()
    with pytest.raises(TrainingError, match=r"Start its Ray again .* then give the same command again"):
        Comebacks(cluster=address).check_cluster()
    Comebacks().check_cluster()
    assert "STEADFAST_CAME_BACK" not in os.environ
