"""The environment of a run: versions, processors, and the commit of the working tree."""

import io
import json
import logging
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from threading import Event as Flag
from typing import Any, ClassVar
import pytest
import torch
from steadfast.config import parse_config
from steadfast.run.directory import RunDirectory
from steadfast.run.events import (
    AttemptEnded,
    AttemptStarted,
    Checkpoint,
    CheckpointFailed,
    CheckpointQuarantined,
    Event,
    Failure,
    Finished,
    Hang,
    HangOver,
    Log,
    ModelSharded,
    NodeQuarantined,
    NotSaved,
    PartsInEvaluation,
    PrecisionLowered,
    Preemption,
    RankTimes,
    Rollback,
    Scale,
    Shares,
    Silent,
    Snapshot,
    Straggler,
    Validation,
    VariablesKept,
    Waiting,
    WarmupShortened,
    WeightsLeftOut,
)
from steadfast.storage import LocalStore
from steadfast.telemetry.console import Console
from steadfast.telemetry.environment import environment
from steadfast.telemetry.meters import Meters
from steadfast.telemetry.outcome import result
from steadfast.telemetry.past import Past
from steadfast.telemetry.tensorboard import TensorBoardTracker
from steadfast.telemetry.throughput import peak_flops, total_peak_flops
from steadfast.telemetry.trackers import MemoryTracker, Tracker, Trackers, build_trackers
from steadfast.units import compact, duration, node_name, size
from steadfast.world.device import Gpu
from tests.support.events import changed


def test_environment_is_plain_json_and_survives_outside_a_repository(tmp_path: Path) -> None:
    seen = json.loads(json.dumps(environment(tmp_path)))
    assert seen["git"] is None
    assert torch.__version__.startswith(seen["torch"].split("+")[0])
    assert seen["num_cpus"] >= 1


def test_environment_is_known_where_ray_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "ray":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("steadfast.telemetry.environment.version", version)
    seen = environment(tmp_path)
    assert (seen["torch"], seen["ray"]) == ("1.0", None)


def test_environment_knows_a_changed_working_tree(tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    tracked = tmp_path / "code.py"
    tracked.write_text("1")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.jsonl").write_text("")
    clean = environment(tmp_path)["git"]
    tracked.write_text("2")
    assert len(clean) == 40
    assert environment(tmp_path)["git"] == f"{clean}-dirty"
