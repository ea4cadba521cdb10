"""Trackers: how figures are sorted, and that a tracker of the user's own can neither end nor delay a run."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event as Flag
from typing import ClassVar
from unittest.mock import Mock, call

import pytest
import torch

from steadfast.config import parse_config
from steadfast.run.events import Validation
from steadfast.storage import LocalStore
from steadfast.telemetry.trackers import Tracker, Trackers, build_trackers
from tests.support.events import LOG


def test_trackers_sort_what_a_hook_logs_by_its_kind() -> None:
    tracker = Mock(spec=Tracker)
    values = {
        "one": torch.tensor(1.5),
        "two": 2,
        "said": "hello",
        "face": torch.zeros(3, 4, 5),
        "rows": [{"a": 1, "b": "x"}, {"a": 22}],
    }
    Trackers([tracker]).log(7, values)
    assert tracker.scalars.mock_calls == [call(7, {"one": 1.5, "two": 2.0})]
    assert tracker.text.mock_calls == [call(7, "said", "hello"), call(7, "rows", "a   b\n1   x\n22")]
    ((step, tag, pixels),) = (each.args for each in tracker.image.mock_calls)
    assert (step, tag, pixels.shape) == (7, "face", (4, 5, 3))


def test_trackers_sort_figures() -> None:
    tracker = Mock(spec=Tracker)
    trackers = Trackers([tracker])
    trackers.record(LOG)
    trackers.record(Validation(step=10, metrics={"loss": 2.5}))
    trackers.close()
    train = {"loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "accuracy": 0.75}
    speed = {
        "step_ms": 12.5,
        "data_wait": 0.0,
        "units_per_s": 100.0,
        "samples_per_s": 10.0,
        "mfu": 0.4,
        "memory_bytes": 1024,
        "world_size": 2,
    }
    expected = {f"train/{name}": value for name, value in train.items()}
    expected |= {f"speed/{name}": value for name, value in speed.items()}
    assert tracker.mock_calls == [call.scalars(10, expected), call.scalars(10, {"validation/loss": 2.5}), call.close()]


class Misbehaving:
    """A tracker of the user's own without `text` that does `misbehave` where `when` says; `drawn` are its steps."""

    when = ""
    misbehave: Callable[[], object] = staticmethod(lambda: None)
    drawn: ClassVar[list[int]] = []
    closed = Flag()

    def __init__(self, location: str, first_step: int) -> None:
        self._come_to("init")

    def scalars(self, step: int, values: dict[str, float]) -> None:
        self._come_to("scalars")
        self.drawn.append(step)

    def close(self) -> None:
        self._come_to("close")
        self.closed.set()

    def _come_to(self, where: str) -> None:
        if self.when == where:
            type(self).misbehave()


def own_tracker(folder: Path, monkeypatch: pytest.MonkeyPatch, when: str, misbehave: Callable[[], object]) -> Trackers:
    for name, value in {"when": when, "misbehave": staticmethod(misbehave), "drawn": [], "closed": Flag()}.items():
        monkeypatch.setattr(Misbehaving, name, value)
    config = parse_config(f"trackers: [{{target: '{__name__}:Misbehaving'}}]")
    return build_trackers(config, LocalStore(folder), 1)


def test_a_tracker_of_the_users_own_needs_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = own_tracker(tmp_path, monkeypatch, "", lambda: None)
    trackers.text(1, "sample", "To be")
    trackers.scalars(2, {})
    trackers.close()
    assert Misbehaving.drawn == [2]
    assert Misbehaving.closed.is_set()
    assert not caplog.records


@pytest.mark.parametrize("error", [ConnectionError("gone"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("when", ["init", "scalars", "close"])
def test_a_tracker_that_raises_is_turned_off_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str, error: BaseException
) -> None:
    trackers = own_tracker(tmp_path, monkeypatch, when, Mock(side_effect=error))
    trackers.scalars(1, {})
    trackers.scalars(2, {})
    trackers.close()
    assert Misbehaving.drawn == ([1, 2] if when == "close" else [])
    assert Misbehaving.closed.is_set() == (when == "scalars")
    (told,) = caplog.messages
    assert type(error).__name__ in told


@pytest.mark.parametrize("when", ["init", "scalars", "close"])
def test_a_tracker_that_hangs_holds_neither_a_step_nor_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    monkeypatch.setattr("steadfast.telemetry.background._LIMIT_S", 0.2)
    release = Flag()
    trackers = own_tracker(tmp_path, monkeypatch, when, lambda: release.wait(60))
    try:
        began_s = time.monotonic()
        trackers.scalars(1, {})
        assert time.monotonic() - began_s < 0.2
        time.sleep(0.3)
        trackers.scalars(2, {})
        trackers.close()
        assert time.monotonic() - began_s < 20
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith(__name__))
        assert len(caplog.messages) == 1
        assert "is off until the next attempt" in caplog.text
    finally:
        release.set()
