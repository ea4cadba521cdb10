"""The guard that every test runs under notices what it is there for."""

import os
import subprocess
import threading

import pytest

from tests.support.leaks import forbid_leaks


def test_a_variable_that_is_left_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADFAST_LABEL", "before")
    with pytest.raises(AssertionError, match="STEADFAST_LABEL"), forbid_leaks():
        os.environ["STEADFAST_LABEL"] = "after"


def test_a_thread_that_is_left_is_named_unless_it_ends_in_time() -> None:
    with forbid_leaks():
        threading.Thread(target=threading.Event().wait, args=(0.05,)).start()
    over = threading.Event()
    with pytest.raises(AssertionError, match="thread late"), forbid_leaks(patience_s=0.1):
        threading.Thread(target=over.wait, name="late").start()
    over.set()


def test_a_process_that_is_left_is_named_but_not_what_an_older_one_starts() -> None:
    words = ["bash", "-c", "read; sleep 60 & echo started; read; kill %1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin
        assert server.stdout
        with forbid_leaks(patience_s=0.1):
            print(file=server.stdin, flush=True)
            assert server.stdout.readline() == "started\n"
        with pytest.raises(AssertionError, match="sleep 30"), forbid_leaks(patience_s=0.1):
            late = subprocess.Popen(["sleep", "30"])
        late.kill()
        late.wait()
