"""The tracker for TensorBoard: each step once, no secrets, and one warning when it fails."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadfast.config import parse_config
from steadfast.run.events import Log, Validation
from steadfast.storage import LocalStore
from steadfast.telemetry.past import Past
from steadfast.telemetry.trackers import build_trackers
from tests.support.events import LOG, changed


def drawn(folder: Path) -> Any:
    """Return what TensorBoard reads of a run."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_tensorboard_draws_a_step_done_again_once_and_an_image_of_a_hook(tmp_path: Path) -> None:
    for first_step, value in ((1, 1.0), (3, 2.0)):
        trackers = build_trackers(parse_config(""), LocalStore(tmp_path), first_step)
        for step in range(first_step, 5):
            trackers.record(changed(LOG, step=step, total_steps=4, loss=value))
        if first_step == 3:
            trackers.log(3, {"hooks/face": np.zeros((4, 5, 3))})
        trackers.close()
    found = drawn(tmp_path)
    points = [(point.step, point.value) for point in found.Scalars("train/loss")]
    assert points == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    (image,) = found.Images("hooks/face")
    assert (image.step, image.height, image.width) == (3, 4, 5)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensorboard")]


def test_tensorboard_gets_what_a_killed_leader_had_not_drawn(tmp_path: Path) -> None:
    def log(step: int) -> Log:
        return changed(LOG, step=step, total_steps=9)

    validations = [Validation(step=step, metrics={"loss": 1.0}) for step in (2, 4)]
    figures: list[Log | Validation] = [log(1), log(2), validations[0], log(3), log(4), validations[1]]
    for first_step, last in ((1, 3), (5, 0)):
        trackers = build_trackers(parse_config(""), LocalStore(tmp_path), first_step)
        trackers.begin(first_step - 1, Past(), figures if first_step > 1 else ())
        for event in figures[:last] or [log(5)]:
            trackers.record(event)
        trackers.close()
    found = drawn(tmp_path)
    assert [point.step for point in found.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert [point.step for point in found.Scalars("validation/loss")] == [2, 4]


def test_tensorboard_has_the_configuration_without_secrets_and_what_interrupted_the_run(tmp_path: Path) -> None:
    config = parse_config("cluster: {env: {TOKEN: hidden}}")
    for first_step, past in ((1, Past()), (8, Past(1, 1, 2, ("failure: its node is gone",)))):
        trackers = build_trackers(config, LocalStore(tmp_path), first_step)
        trackers.begin(first_step - 1, past)
        trackers.close()
    found = drawn(tmp_path)
    counts = {}
    for tag in ("failures", "resizes", "restarts"):
        counts[tag] = [(each.step, each.value) for each in found.Scalars(f"events/{tag}")]
    assert counts == {"failures": [(0, 0), (7, 1)], "resizes": [(0, 0), (7, 1)], "restarts": [(0, 0), (7, 2)]}
    (told,) = found.Tensors("events/text_summary")
    assert (told.step, told.tensor_proto.string_val[0].decode()) == (7, "    failure: its node is gone")
    written = found.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "global_size: 48" in written
    assert "hidden" not in written
