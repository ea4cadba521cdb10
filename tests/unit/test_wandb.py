"""How the tracker for Weights & Biases opens and closes its run, over a stand-in for the library."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from steadfast.config import WandbConfig
from steadfast.storage import LocalStore
from steadfast.telemetry.trackers import Trackers
from steadfast.telemetry.wandb import WandbTracker


class Library:
    """Writes down what is asked of it; `finish` waits until `may_finish` is set, and `log` raises if `broken`."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.may_finish = threading.Event()
        self.finishing = threading.Event()
        self.broken = False
        self.api = SimpleNamespace(api_key=None)

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802 - as W&B has it
        return settings

    def init(self, **options: Any) -> Library:
        self.told.append(("init", options["id"], options["reinit"]))
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if self.broken:
            raise OSError("no room")
        self.told.append((step, values))

    def Image(self, pixels: Any) -> tuple[str, Any]:  # noqa: N802 - as W&B has it
        return "image", pixels.shape

    def finish(self) -> None:
        self.finishing.set()
        assert self.may_finish.wait(20)
        self.told.append("finish")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setattr("steadfast.telemetry.wandb.require_extra", lambda *_: None)
    return library


def tracker(folder: Path) -> WandbTracker:
    return WandbTracker(WandbConfig(), "run", {}, LocalStore(folder))


def test_a_failed_attempt_leaves_its_run_and_the_next_one_opens_it_when_it_is_closed(
    library: Library, tmp_path: Path
) -> None:
    first = Trackers([tracker(tmp_path)])
    first.scalars(1, {"loss": 2.0})
    first.leave()  # returns at once
    assert library.finishing.wait(20)
    second = Trackers([tracker(tmp_path)])
    second.scalars(2, {"loss": 1.0})
    opened, logged = library.told
    assert logged == (1, {"loss": 2.0})
    library.may_finish.set()
    second.close()
    assert library.told == [opened, logged, "finish", opened, (2, {"loss": 1.0}), "finish"]
    assert opened[2] == "create_new"  # a run of the user's own stays as it is


def test_an_image_is_logged_and_a_run_in_which_nothing_can_be_drawn_any_more_is_closed(
    library: Library, tmp_path: Path
) -> None:
    library.may_finish.set()
    for library.broken in (False, True, True):
        one = Trackers([tracker(tmp_path)])
        one.log(3, {"hooks/face": np.zeros((4, 5))})
        one.close()
    drawn = (3, {"hooks/face": ("image", (4, 5, 1))})
    opened = library.told[0]
    assert library.told == [opened, drawn, "finish", opened, "finish", opened, "finish"]


def test_figures_that_a_killed_leader_had_not_logged_come_first(library: Library, tmp_path: Path) -> None:
    library.may_finish.set()
    for steps, lost in (([1, 2], ()), ([5], (1, 2, 3, 4))):
        one = tracker(tmp_path)
        for step in lost:
            one.resend(step, {"train/loss": 1.0})
        for step in steps:
            one.scalars(step, {"train/loss": 1.0})
        one.close()
    assert [each[0] for each in library.told if isinstance(each[0], int)] == [1, 2, 3, 4, 5]
