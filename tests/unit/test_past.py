"""The past of a run, as its events tell it."""

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


def test_the_past_knows_the_newest_checkpoint_and_where_the_last_attempt_trained(tmp_path: Path) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    seconds = dict.fromkeys(("detected_s", "formed_s", "built_s", "restored_s", "first_step_s"), 0.0)
    saved = Checkpoint(step=30, path="", seconds=0.0, blocked_s=0.0, bytes=0)
    started = AttemptStarted(step=0, source="start", world_size=2, nodes={"a": (0,), "b": (1,)}, **seconds)
    for event in (saved, started):
        directory.record(event)
    past = Past.read(directory)
    assert (past.committed, past.num_nodes) == (30, 2)
