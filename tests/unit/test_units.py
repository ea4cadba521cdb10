"""Numbers with their units, and names of nodes, as a person reads them."""

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


def test_numbers_in_words() -> None:
    assert [compact(v) for v in (0, 812, 39_812, 1.2e6)] == ["0", "812", "39.8k", "1.2M"]
    assert [size(v) for v in (0, 512, 2048, 3 * 2**40)] == ["0.0 B", "512.0 B", "2.0 KiB", "3072.0 GiB"]
    spans = [duration(v) for v in (0, 45.2, 221, 3200, 11_520)]
    assert spans == ["0s", "45s", "4m", "53m", "3h 12m"]


def test_only_long_ids_of_nodes_are_shortened() -> None:
    assert node_name("0123456789abcdef" * 3 + "01234567") == "01234567"
    assert node_name("training-node-02.example.com") == "training-node-02.example.com"
