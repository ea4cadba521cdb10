"""The tracker for TensorBoard: each step once, no secrets, and one warning when it fails."""

import logging
import threading
from pathlib import Path

import numpy as np
import pytest

from steadfast.config import parse_config
from steadfast.storage import LocalStore
from steadfast.telemetry.past import Past
from steadfast.telemetry.tensorboard import TensorBoardTracker
from steadfast.telemetry.trackers import Tracker, build_trackers
from tests.support.events import LOG, changed


def drawn(directory: Path) -> list[tuple[int, float]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(directory))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars("train/loss")]


def test_tensorboard_draws_a_step_done_again_once(tmp_path: Path) -> None:
    for first_step, value in ((1, 1.0), (3, 2.0)):
        trackers = build_trackers(parse_config(""), LocalStore(tmp_path), first_step)
        for step in range(first_step, 5):
            trackers.record(changed(LOG, step=step, total_steps=4, loss=value))
        trackers.close()
    assert drawn(tmp_path / "tensorboard") == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorboard")]


def test_tensorboard_has_the_configuration_without_secrets_and_what_interrupted_the_run(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = parse_config("cluster: {env: {TOKEN: hidden}}")
    for first_step, past in ((1, Past()), (8, Past(1, 1, 2, ("failure: its node is gone",)))):
        trackers = build_trackers(config, LocalStore(tmp_path), first_step)
        trackers.begin(first_step - 1, past)
        trackers.close()
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    counts = {}
    for tag in ("failures", "resizes", "restarts"):
        counts[tag] = [(each.step, each.value) for each in found.Scalars(f"events/{tag}")]
    assert counts == {"failures": [(0, 0), (7, 1)], "resizes": [(0, 0), (7, 1)], "restarts": [(0, 0), (7, 2)]}
    (told,) = found.Tensors("events/text_summary")
    assert (told.step, told.tensor_proto.string_val[0].decode()) == (7, "    failure: its node is gone")
    written = found.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "global_size: 48" in written
    assert "hidden" not in written


def test_a_failing_tracker_warns_once_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        tracker: Tracker = TensorBoardTracker(LocalStore(tmp_path / "file"), first_step=1)
        tracker.scalars(1, {"train/loss": 1.0})
        tracker.close()
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text


def test_tensorboard_draws_an_image_of_a_hook(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = build_trackers(parse_config(""), LocalStore(tmp_path), 1)
    trackers.log(3, {"hooks/face": np.zeros((4, 5, 3))})
    trackers.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("hooks/face")
    assert (image.step, image.height, image.width) == (3, 4, 5)
