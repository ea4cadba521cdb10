"""Signals to a program that has called `fit`, and goes on after it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from app.run.interrupts import Interrupts


def test_the_second_signal_raises_where_the_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.run.interrupts._SAME_S", 0.0)
    former = signal.getsignal(signal.SIGINT)
    stops: list[bool] = []
    with Interrupts(lambda: stops.append(True), of_process=False) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert (interrupts.stopping, stops) == (True, [True])
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
