"""What a rank keeps of its steps does not grow with their number, and that it reads all of them back is no hang."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from steadfast.config import Config, CosineConfig, DdpConfig, KeepBestConfig
from steadfast.data.fingerprint import LAYOUT
from steadfast.plan import Plan
from steadfast.run.directory import RunDirectory
from steadfast.run.ledger import StepStats, StepTimes
from steadfast.storage import LocalStore
from steadfast.telemetry import recorder
from steadfast.telemetry.meters import Meters
from steadfast.world.runtime import Outcome
from tests.support.history import write_ledger

_STEPS = 20_000
_MOST_BYTES = 100_000  # one float a step would take over six times as much


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> recorder.Recorder:
    """Return the recorder of a rank that does not lead."""
    monkeypatch.setattr(recorder, "_meters", lambda worker, tf32: Meters())
    monkeypatch.setattr(recorder, "Profiler", Mock())
    worker = Mock(precision=Mock(device=torch.device("cpu")), units_per_sample=1)
    config, world = Mock(spec=Config), Mock(leader=False, attempt=1)
    worker.config = config
    config.weights_digest_every = config.profile = None
    config.precision = Mock(tf32=False)
    config.logging = Mock(every_steps=50, gradient_norms_every=None)
    follower = recorder.Recorder(RunDirectory(LocalStore(tmp_path)), Mock(), world, worker)
    follower.begin(Plan.even(4, 2, 2), Mock(), Mock(), Mock())
    return follower


def test_rank_that_logs_nothing_gathers_nothing(follower: recorder.Recorder) -> None:
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


def test_whoever_waits_for_the_summary_sees_the_ledger_being_read(follower: recorder.Recorder) -> None:
    line = {"step": 1, "attempt": 1, "num_samples": 4, "step_s": 1.0, "time_s": 9.0}
    write_ledger(follower._directory.store, [line])
    summary = follower._summary(Outcome("finished", 1), {})
    assert summary["samples"] == 4
    cast(Mock, follower._world.progress.mark).assert_called_once_with("end")


def test_recorder_notes_a_setup_that_differs_from_the_configuration(follower: recorder.Recorder) -> None:
    config, worker = cast(Mock, follower._config), cast(Mock, follower._worker)
    config.parallel, config.schedule, config.checkpoint = DdpConfig(), CosineConfig(warmup_steps=50), Mock()
    worker.num_steps, worker.frozen, worker.base = 20, ("backbone", "norms.1"), {}
    worker.loaded = ("a", "b"), ("c",)
    worker.built_whole_because = "random numbers of a generator of its own"
    worker.fingerprint = f"{LAYOUT}0123456789abcdef"
    cast(Mock, follower._world).leader = True
    follower._tell_of_shortened_warmup()
    follower._tell_of_the_model()
    assert [call.args[0].line() for call in cast(Mock, follower._runtime.publish).call_args_list] == [
        "schedule.warmup_steps 50 -> 20: the run has 20 steps",
        "run.init_from lacks 2 of the model's names and has 1 other name: a, b, c",
        "these modules stay in evaluation mode: backbone, norms.1",
        "the dataset draws numbers that nothing seeds: a sample that is read twice differs. So a resume knows the data "
        "by length and layout alone. Draw from torch, numpy.random or random, which are seeded",
        "each worker holds the whole model while the model is built and restored: "
        "random numbers of a generator of its own",
        "checkpoint.trainable_only leaves nothing out: all parameters of the model are trained",
    ]


def test_recorder_marks_a_validation_that_is_better_than_all_before(follower: recorder.Recorder) -> None:
    config = cast(Mock, follower._config)
    config.checkpoint = Mock(keep_best=None)
    losses = [2.0, 3.0, 1.5, float("nan"), 1.6, 1.4]
    assert [follower._is_best({"loss": loss}) for loss in losses] == [False, False, True, False, False, True]
    config.checkpoint = Mock(keep_best=KeepBestConfig(metric="accuracy", mode="max"))
    follower._best = float("inf")
    assert [follower._is_best({"accuracy": each}) for each in (0.1, 0.3, 0.2)] == [False, True, False]
