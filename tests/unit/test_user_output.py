"""Lines that user code writes in a worker of Ray, and its breakpoints."""

import os
import sys
import time

import pytest

from steadfast.orchestration import user_output
from steadfast.orchestration.user_output import shown_output


def test_lines_of_both_streams_are_sent_and_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    sent: list[str] = []
    with shown_output(sent.extend):
        print("a", "b")
        print("c", file=sys.stderr)
        print("half", end="")
        print(" and half\n\nlast")
        sys.stdout.flush()
        sys.stderr.write("1%\r2%\r3%\n")
        print("without an end", end="")
    print("afterwards")
    assert sent == ["a b", "c", "half and half", "", "last", "3%"]
    assert capsys.readouterr() == ("a b\nhalf and half\n\nlast\nwithout an endafterwards\n", "c\n1%\r2%\r3%\n")


def test_a_line_is_sent_while_the_code_goes_on() -> None:
    sent: list[str] = []
    with shown_output(sent.extend):
        print("now")
        deadline_s = time.monotonic() + 5.0
        while not sent and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert sent == ["now"]


def test_a_flood_of_lines_is_cut_and_a_forked_process_writes_to_the_log_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_output, "_MOST_LINES", 3)
    sent: list[str] = []
    with shown_output(sent.extend):
        child = os.fork()
        if not child:
            print("of the child")
            os._exit(0)
        os.waitpid(child, 0)
        sys.stdout.write("\n".join("abcde") + "\n")
    assert sent == ["a", "b", "c", "... 2 lines left out, which Ray's log of this worker has"]


def test_a_breakpoint_says_once_how_to_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_DEBUG", raising=False)
    before = sys.breakpointhook
    sent: list[str] = []
    with shown_output(sent.extend):
        for _ in range(2):
            breakpoint()
    assert sys.breakpointhook is before
    (line,) = sent
    assert "test_user_output.py:" in line
    assert "torchrun --nproc-per-node 1" in line
    monkeypatch.setenv("RAY_DEBUG", "legacy")
    with shown_output(sent.extend):
        assert sys.breakpointhook is before
