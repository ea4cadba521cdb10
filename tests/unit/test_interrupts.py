"""Signals to a program that has called `fit`, and goes on after it."""

import ctypes
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from steadfast.run.interrupts import Interrupts
from tests.support.command import ROOT


def test_the_second_signal_raises_where_the_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.run.interrupts._SAME_S", 0.0)
    former = signal.getsignal(signal.SIGINT)
    stops: list[str] = []
    with Interrupts(stops.append, of_process=False) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert (interrupts.stopping, stops) == (True, [f"SIGINT to pid {os.getpid()} on {socket.gethostname()}"])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is former


def test_outside_the_main_thread_handlers_stay_as_they_are() -> None:
    found: list[object] = []

    def look() -> None:
        with Interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]


def test_a_closed_terminal_stops_a_run_and_nohup_does_not() -> None:
    stops: list[bool] = []
    former: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: former.append(number))  # the default would end the tests
    try:
        with Interrupts(lambda _: stops.append(True)) as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert (interrupts.stopping, stops, former) == (True, [True], [])
        os.kill(os.getpid(), signal.SIGHUP)
        assert former == [signal.SIGHUP]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Interrupts(lambda _: stops.append(True)) as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.stopping
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_notice_stops_a_run_once_and_leaves_it_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.run.interrupts._SAME_S", 0.0)
    stops: list[str] = []
    with Interrupts(stops.append, of_process=False) as interrupts:
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            assert interrupts.stopping
        assert [stop.split()[0] for stop in stops] == ["SIGUSR2"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_handler_that_a_library_sets_in_c_is_replaced(number: signal.Signals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    taken: list[int] = []
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(taken.append)
    with Interrupts() as interrupts:
        with interrupts.spared():
            ctypes.CDLL(None).signal(number, handler)
            signal.pthread_kill(threading.get_ident(), number)
        assert interrupts.stopping
    assert taken == []


@pytest.mark.parametrize(("is_stopped", "left_s"), [(True, 0), (False, 60)])
def test_an_alarm_that_a_librarys_handler_has_set_is_cancelled(is_stopped: bool, left_s: int) -> None:
    with Interrupts() as interrupts:
        with interrupts.spared():
            signal.alarm(60)
            if is_stopped:
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert signal.alarm(0) == left_s


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("thread_starts", ["before", "within"])  # any thread may be given a signal of the process
def test_a_library_that_is_started_does_not_take_over_a_signal(number: signal.Signals, thread_starts: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    taken: list[int] = []
    thread = threading.Thread(target=time.sleep, args=(0.5,))
    with Interrupts() as interrupts:
        if thread_starts == "before":
            thread.start()
        with interrupts.spared():
            if thread_starts == "within":
                thread.start()
            signal.signal(number, lambda number, _: taken.append(number))
            os.kill(os.getpid(), number)
            thread.join()
        assert interrupts.stopping
    assert taken == []


SLOW = """
import os, time
open(os.environ["READY"], "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("module", ["yaml", "target"])  # the program's own imports, and code of the user
def test_command_ends_with_three_and_leaves_nothing_if_it_is_stopped_while_it_imports(
    tmp_path: Path, module: str, number: signal.Signals
) -> None:
    (tmp_path / f"{module}.py").write_text(SLOW)
    ready = tmp_path / "ready"
    words = ("--config", "digits.yaml", "data.target=target:dataset", f"run.storage={tmp_path}/runs")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "READY": str(ready)}
    command = subprocess.Popen([sys.executable, "main.py", *words], env=env, stderr=subprocess.PIPE, text=True)
    try:
        until_s = time.monotonic() + 60.0
        while not ready.exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        command.send_signal(number)
        _, said = command.communicate(timeout=30)
    finally:
        command.kill()
        command.communicate()
    assert (command.returncode, said) == (3, "")
    assert not (tmp_path / "runs").exists()


WORKER = """
import os, signal, subprocess, sys
from steadfast.run.interrupts import outlive_sigterm
outlive_sigterm()
os.kill(os.getpid(), signal.SIGTERM)
started = subprocess.Popen(["sleep", "60"])
ready, told = os.pipe()
forked = os.fork()
if not forked:
    os.write(told, b"!")
    signal.pause()
os.read(ready, 1)
for child in (started.pid, forked):
    os.kill(child, signal.SIGTERM)
print(started.wait(), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
"""


def test_no_signal_ends_a_process_that_is_started_in_between_and_sigterm_ends_what_that_one_starts() -> None:
    with Interrupts() as interrupts:
        with interrupts.spared():
            child = subprocess.Popen(["sleep", "60"])
            worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            # It is not lost. A thread of a library may have received it, which takes a moment on a busy machine.
            until_s = time.monotonic() + 60.0
            while not interrupts.stopping:
                assert time.monotonic() < until_s
                time.sleep(0.01)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                child.send_signal(number)
            assert worker.communicate(timeout=60)[0] == "-15 -15\n"
            assert worker.returncode == 0
            assert child.poll() is None
        finally:
            for each in (child, worker):
                each.kill()
                each.communicate()


COMMAND = """
import pty, os, sys, time
from steadfast.run.interrupts import Interrupts
with Interrupts(lambda _: print("stopping", flush=True)) as interrupts:
    with interrupts.spared():
        print("ready", flush=True)
        time.sleep(float(sys.argv[2]))
    until_s = time.monotonic() + 10.0
    while not interrupts.stopping:
        if time.monotonic() > until_s:
            sys.exit("nobody has told of the terminal")
        time.sleep(0.01)
    print("a line more", flush=True)
open(sys.argv[1], "w").write("stopped in order")
"""


@pytest.mark.parametrize("starting_s", [0.0, 1.0])
def test_a_run_whose_terminal_goes_away_comes_to_its_end(tmp_path: Path, starting_s: float) -> None:
    """Also where that happens while others are started, and although it has more to say."""
    end = tmp_path / "end"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", COMMAND, str(end), str(starting_s)])
    assert b"ready" in os.read(terminal, 1000)
    time.sleep(0.2)
    os.close(terminal)  # the kernel tells all in the foreground
    _, status = os.waitpid(pid, 0)
    assert (status, end.read_text()) == (0, "stopped in order")


@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGTERM, "raise ImportError('half imported')"), (signal.SIGINT, "mlp = object")]
)
def test_a_signal_that_an_import_has_swallowed_still_stops_the_command(
    tmp_path: Path, number: signal.Signals, ending: str
) -> None:
    swallows = f"import os\ntry: os.kill(os.getpid(), {int(number)})\nexcept BaseException: pass\n{ending}\n"
    (tmp_path / "swallows.py").write_text(swallows)
    options = ["--config", "ddp.yaml", "model={target: 'swallows:mlp'}", f"run.storage={tmp_path}/runs"]
    ended = subprocess.run([sys.executable, ROOT / "main.py", *options], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, "half imported" in ended.stderr) == (3, False), ended.stderr
