"""What `status` says of a run on Ray while it runs, and its report afterwards, of a rank that is slow."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from steadfast.analysis.report.course import Course
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from tests.support.checks import check_stopped
from tests.support.command import ROOT, Commands, Running

SLOW = "faults.inject=[{kind: slow_at, ranks: [1], ms: 60}, {kind: slow_at, ranks: [0], ms: 20}]"


def status_of(running: Running) -> dict[str, Any]:
    command = [sys.executable, "main.py", "status", str(running.directory), "--json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_slow_rank_is_seen_in_status_and_report(on_head: Commands) -> None:
    running = on_head().start("run.steps=100000", SLOW)
    running.wait_for_event("attempt_started", timeout_s=150)
    running.wait_for_event("rank_times")
    status = status_of(running)
    assert status["state"] == "running"
    (node,) = status["nodes"]
    assert node["ranks"] == [0, 1]
    assert node["own_ms"][1] > 1.5 * node["own_ms"][0]
    assert node["last"] == [0.0, 1.0]
    check_stopped(running)
    ranks = Course.read(RunDirectory(LocalStore(running.directory))).ranks()
    assert [(each.rank, each.last) for each in ranks] == [(0, 0.0), (1, 1.0)]
