"""Retention: which checkpoints are kept."""

from dataclasses import replace

import pytest

from steadfast.checkpoint.manifest import Manifest
from steadfast.checkpoint.retention import steps_to_keep
from steadfast.config import CheckpointConfig

NOTHING = frozenset[int]()
LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: float("nan"), 50: 2.5, 60: 2.2}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (CheckpointConfig(), {40, 50, 60}),
        (CheckpointConfig(keep_last=1), {60}),
        (CheckpointConfig(keep_last=1, keep_every=25), {30, 50, 60}),
        (CheckpointConfig(keep_last=1, keep_best={"metric": "loss"}), {20, 60}),
        (CheckpointConfig(keep_last=1, keep_best={"metric": "loss", "mode": "max"}), {10, 60}),
        (CheckpointConfig(keep_last=1, keep_best={"metric": "accuracy", "mode": "max"}), {60}),
    ],
)
def test_which_are_kept(config: CheckpointConfig, kept: set[int]) -> None:
    blank = Manifest(0, 1, 1, 0.0, "", {})
    manifests = [replace(blank, step=step, metrics={"loss": loss}) for step, loss in LOSSES.items()]
    assert steps_to_keep(config, manifests, NOTHING) == kept


def test_what_is_kept_for_good_stays_so_when_its_neighbours_have_gone() -> None:
    blank, config = Manifest(0, 1, 1, 0.0, "", {}), CheckpointConfig(keep_last=1, keep_every=100)
    steps: set[int] = set()
    for step in range(40, 1000, 40):
        steps = steps_to_keep(config, [replace(blank, step=each) for each in steps | {step}], NOTHING)
    assert steps == {120, 200, 320, 400, 520, 600, 720, 800, 920, 960}


@pytest.mark.parametrize(
    ("skip", "steps"),
    [({58, 59, 60}, {50, 60}), ({60}, {50, 60}), ({51, 60}, {50, 60}), ({51, 52}, {60}), ({10, 60}, {50, 60})],
)
def test_while_a_rollback_may_go_further_back_there_is_something_to_go_back_to(skip: set[int], steps: set[int]) -> None:
    manifests = [Manifest(step, 1, 1, 0.0, "", {}) for step in (40, 50, 60)]
    assert steps_to_keep(CheckpointConfig(keep_last=1), manifests, frozenset(skip)) == steps
