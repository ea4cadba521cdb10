"""What a rank of torchrun's says of an error, and when."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from steadfast.errors import TrainingError, UsageError
from steadfast.launch.ranks import end_rank
from steadfast.world.groups import PeerLost

LOST = TrainingError("another rank is gone")
LOST.__cause__ = PeerLost("gloo: connection closed by peer")


class Ended(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "rank", "wait_s", "code"),
    [
        (UsageError("no"), "0", 0.0, 2),
        (UsageError("no"), "1", 3.0, 2),
        (ValueError("no"), "1", 3.0, 1),
        (PeerLost("no"), "0", 6.0, 1),
        (LOST, "0", 6.0, 1),
    ],
)
def test_a_rank_waits_for_one_that_may_know_better(
    error: Exception,
    rank: str,
    wait_s: float,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waited: list[float] = []
    sleep, own = time.sleep, threading.current_thread()

    def wait(seconds: float) -> None:
        if threading.current_thread() is own:
            waited.append(seconds)
        else:  # one that an earlier test has left: a claim is renewed as long as its process lives
            sleep(seconds)

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr("time.sleep", wait)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(Ended, match=str(code)):
        end_rank(error, "what has failed")
    assert sum(waited) == wait_s
    assert capsys.readouterr().err == "what has failed\n"
    left = json.loads((tmp_path / "error.json").read_text())["message"]
    assert left["message"] == (f"error: {error}" if code == 2 or error is LOST else f"{type(error).__name__}: no")
