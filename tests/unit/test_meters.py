"""The meters of a log step: the median step and the mean rates."""

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


def test_meters_give_median_step_and_mean_rates() -> None:
    meters = Meters(flops_per_sample=5e9, peak_flops_total=1e12)
    for seconds in (5.0, 1.0, 1.0, 3.0):
        meters.record(seconds, num_samples=10, units=1000, data_s=0.5)
    first = meters.snapshot(remaining_steps=6)
    rates = {"units_per_s": 400.0, "samples_per_s": 4.0, "mfu": 0.02}
    assert first == {"step_ms": 2000.0, "data_wait": 0.2, "eta_s": 12.0, **rates}
    meters.record(0.5, num_samples=10, units=1000)
    second = meters.snapshot(remaining_steps=0)
    assert second["step_ms"] == 500.0
    assert second["data_wait"] == 0.0


def test_mfu_is_unknown_without_a_peak() -> None:
    meters = Meters(flops_per_sample=5e9)
    meters.record(2.0, num_samples=10, units=10)
    assert meters.snapshot(remaining_steps=3)["mfu"] is None
