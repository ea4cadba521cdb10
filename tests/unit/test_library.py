"""Where `fit` trains, and the calls that it refuses before anything starts."""

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import steadfast
from steadfast import library
from steadfast.config import Config, ScalingConfig
from steadfast.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_worker": 2}, r"scaling\.num_worker: unknown key; nearest is num_workers"),
        ({"num_workers": [3, 1]}, r"scaling\.num_workers: must be \[min, max\] with min at most max, found \[3, 1\]"),
        (4, r'scaling=4: must have keys of the section scaling, such as \{"num_workers": \[1, 4\]\}'),
    ],
)
def test_fit_refuses_a_scaling_that_is_none(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        steadfast.fit(Config(run={"name": "x"}), scaling=given)


def test_scaling_replaces_the_keys_that_it_gives_alone() -> None:
    config = Config.model_validate({"run": {"name": "x"}, "scaling": {"num_workers": 2, "spares": 1}})
    changed = library._with_scaling(config, {"num_workers": [1, 4]})
    assert changed.scaling == ScalingConfig(num_workers=(1, 4), spares=1)
    assert library._with_scaling(config, ScalingConfig(spares=3)).scaling == ScalingConfig(num_workers=(2, 2), spares=3)
    assert changed.run == config.run
    sharded = Config.model_validate({"parallel": {"kind": "fsdp", "shard_size": 2}, "scaling": {"num_workers": 2}})
    with pytest.raises(ConfigError, match=r"parallel\.shard_size"):
        library._with_scaling(sharded, {"num_workers": 1})


@pytest.mark.parametrize(
    ("num_workers", "asked", "in_ray", "expected"),
    [
        (None, False, False, False),
        (None, False, True, False),  # a trial of Ray Tune, whose configuration says nothing of workers
        (1, False, True, False),
        ((1, 4), False, True, True),
        ((1, 4), False, False, False),
        (None, True, False, True),
        (1, True, True, True),
    ],
)
def test_workers_of_ray_train_if_asked_for_or_configured_where_ray_runs(
    num_workers: Any, asked: bool, in_ray: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = ScalingConfig()
    if num_workers is not None:
        scaling = ScalingConfig(num_workers=num_workers)
    monkeypatch.setattr(library, "in_ray_program", lambda: in_ray)
    assert library._is_for_ray(scaling, asked) == expected


def test_fit_refuses_scaling_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "under_torchrun", lambda: True)
    monkeypatch.setattr(library, "in_ray_program", lambda: True)
    assert not library._is_for_ray(ScalingConfig(num_workers=(1, 4)), asked=False)
    with pytest.raises(UsageError, match=r"torchrun has started this process: leave scaling= out"):
        library._is_for_ray(ScalingConfig(), asked=True)


def test_fit_refuses_an_object_that_cannot_be_sent_before_ray_starts(tmp_path: Path) -> None:
    words = [f"run.storage={tmp_path}"]
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"^task: this _lambda_ cannot be sent to workers"):
        steadfast.fit("ddp.yaml", words, model=nn.Linear(1, 1), task=lambda *_: lock, scaling={"num_workers": 2})
    model = nn.Linear(1, 1)
    model.lock = lock  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"^model: this Linear cannot be copied: cannot pickle"):
        steadfast.fit("ddp.yaml", words, model=model, scaling={"num_workers": 2})
    assert not list(tmp_path.iterdir())
