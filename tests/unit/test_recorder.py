"""Tests that what a rank keeps of its steps does not grow with their number."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from app.config import Config
from app.plan import Plan
from app.run.directory import RunDirectory
from app.run.ledger import StepStats, StepTimes
from app.storage import LocalStore
from app.telemetry import recorder
from app.telemetry.meters import Meters

_STEPS = 20_000
_MOST_BYTES = 100_000  # one float a step would take over six times as much


def test_rank_that_logs_nothing_gathers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_meters", lambda config, worker: Meters())
    monkeypatch.setattr(recorder, "Profiler", Mock())
    worker = Mock(precision=Mock(device=torch.device("cpu")))
    config, world, plan = Mock(spec=Config), Mock(leader=False, attempt=1), Plan.even(4, 2, 2)
    config.weights_digest_every = config.profile = None
    config.logging = Mock(every_steps=50, gradient_norms_every=None)
    directory = RunDirectory(LocalStore(tmp_path))
    follower = recorder.Recorder(config, directory, Mock(), world, plan, worker)

    def commit(first: int) -> None:
        for step in range(first, first + _STEPS):
            # A number of its own for each step, as in a run.
            result: Any = SimpleNamespace(seconds=step / 7, data_s=0.0, lr=0.1)
            follower._ran[step] = result, StepTimes(0.1, 0.0)
            follower.commit([StepStats(step, 1.0, 4, 1.0, 4, 0, finite=True)])

    commit(1)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    commit(1 + _STEPS)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < _MOST_BYTES
