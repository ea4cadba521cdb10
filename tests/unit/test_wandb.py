"""How the tracker for Weights & Biases opens and closes its run, over a stand-in for the library."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from steadfast.config import parse_config
from steadfast.storage import LocalStore
from steadfast.telemetry.past import Past
from steadfast.telemetry.trackers import Trackers, build_trackers
from tests.support.events import LOG, changed


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

    def Html(self, text: str, inject: bool) -> str:  # noqa: N802 - as W&B has it
        return text

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
    monkeypatch.setattr("steadfast.telemetry.trackers.require_extra", lambda *_: None)
    return library


def opened_trackers(folder: Path) -> Trackers:
    return build_trackers(parse_config("trackers: [{kind: wandb}]"), LocalStore(folder), 1)


def test_a_failed_attempt_leaves_its_run_and_the_next_one_opens_it_when_it_is_closed(
    library: Library, tmp_path: Path
) -> None:
    first = opened_trackers(tmp_path)
    first.scalars(1, {"loss": 2.0})
    first.leave()  # returns at once
    assert library.finishing.wait(20)
    second = opened_trackers(tmp_path)
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
        one = opened_trackers(tmp_path)
        one.log(3, {"hooks/face": np.zeros((4, 5))})
        one.close()
    drawn = (3, {"hooks/face": ("image", (4, 5, 1))})
    opened = library.told[0]
    assert library.told == [opened, drawn, "finish", opened, "finish", opened, "finish"]


def test_figures_that_a_killed_leader_had_not_logged_come_first(library: Library, tmp_path: Path) -> None:
    library.may_finish.set()
    for steps, lost in (([1, 2], ()), ([5], (1, 2, 3, 4))):
        one = opened_trackers(tmp_path)
        one.begin(lost[-1] if lost else 0, Past(), [changed(LOG, step=step, total_steps=9) for step in lost])
        for step in steps:
            one.scalars(step, {"train/loss": 1.0})
        one.close()
    drawn = [each[0] for each in library.told if isinstance(each[0], int) and "train/loss" in each[1]]
    assert drawn == [1, 2, 3, 4, 5]
