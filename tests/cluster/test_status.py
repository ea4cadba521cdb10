"""What `status`, the live page, the report and Prometheus say of a run on Ray."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from steadfast.analysis.live.feed import Feed
from steadfast.analysis.live.server import LiveServer
from steadfast.analysis.report.course import Course
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from tests.support.checks import check_stopped
from tests.support.command import ROOT, SMALL, Commands, Head, Running
from tests.support.programs import run_program

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SLOW = "faults.inject=[{kind: slow_at, ranks: [1], ms: 60}, {kind: slow_at, ranks: [0], ms: 20}]"


def status_of(running: Running) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_program("main.py", "status", running.directory, "--json"))
    return found


def kill(server: LiveServer, rank: int) -> dict[str, Any]:
    """Kill a worker as the page's button does, and return the worker as the page has shown it."""
    until_s = time.monotonic() + 30
    while not (workers := server.feed.document()["workers"]):
        assert time.monotonic() < until_s
        time.sleep(0.1)
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("POST", "/kill", json.dumps({"rank": rank}), {"X-Steadfast-Token": server.token})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    found: dict[str, Any] = workers[rank]
    return found


def test_a_slow_rank_is_seen_in_status_and_report_and_is_killed_from_the_live_page(on_head: Commands) -> None:
    running = on_head().start("run.steps=100000", SLOW)
    running.wait_for_event("attempt_started", timeout_s=150)
    running.wait_for_event("rank_times")
    status = status_of(running)
    assert status["state"] == "running"
    (node,) = status["nodes"]
    assert node["ranks"] == [0, 1]
    assert node["own_ms"][1] > 1.5 * node["own_ms"][0]
    assert node["last"] == [0.0, 1.0]

    with LiveServer(Feed(RunDirectory(LocalStore(running.directory)))) as server:
        killed = kill(server, 1)
        running.wait_for_event("failure", kind="worker", member=killed["name"])
        running.wait_for_event("attempt_started", attempt=2)
        time.sleep(1)  # until the page's next reading of the run directory
        (interruption,) = server.feed.document()["interruptions"]
    assert interruption["cost"].startswith("0 steps, ")
    assert interruption["lost_steps"] == 0
    notice = f"rank 1 (worker {killed['name']}) is killed, as a user has requested"
    assert notice in [event.get("text") for event in running.events]
    assert killed["pid"] not in running.worker_pids()

    check_stopped(running)
    ranks = Course.read(RunDirectory(LocalStore(running.directory))).ranks()
    assert [(each.rank, each.last) for each in ranks] == [(0, 0.0), (1, 1.0)]


@pytest.mark.slow
def test_a_script_operates_a_run_by_its_json(on_head: Commands, head: Head, tmp_path: Path) -> None:
    """The program that docs/json.md links to."""
    weights, output = tmp_path / "model.pt", tmp_path / "output.txt"
    words = [f"run.storage={tmp_path}", *SMALL, "run.steps=100000", f"cluster.address={head.address}"]
    with output.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "tests/examples/operate.py", "ddp.yaml", "operated", weights, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "app"), "OMP_NUM_THREADS": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finished = Running(process, on_head("operated").directory, output, head).wait(280)
    assert finished.code == 0, finished.output
    said = [line for line in finished.output.splitlines() if line.startswith("operate: ")]
    assert said[1].startswith("operate: resize ")
    assert said[1].endswith(" [2, 1] 0")
    assert " finished at step " in said[-2]
    assert weights.exists()


_ENDPOINTS = """
import sys, time, ray
ray.init(address=sys.argv[1], logging_level="ERROR")
for _ in range(60):  # a node's agent, which serves it, starts after the node
    if all(node["MetricsExportPort"] > 0 for node in ray.nodes()):
        break
    time.sleep(0.5)
for node in ray.nodes():
    print(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics")
"""


@pytest.mark.slow
def test_prometheus_sees_the_run(on_head: Commands, head: Head) -> None:
    running = on_head("seen").start("run.steps=100000", "logging.every_steps=5", "checkpoint.every=1000 steps")
    running.wait_for_step(20, timeout_s=150)
    found = subprocess.run(
        [sys.executable, "-c", _ENDPOINTS, head.address], capture_output=True, text=True, check=True, env=os.environ
    )
    (endpoint,) = found.stdout.split()
    page = ""

    def seen() -> bool:
        nonlocal page
        with urllib.request.urlopen(endpoint, timeout=10) as answer:
            page = answer.read().decode()
        return "ray_steadfast_goodput{" in page

    running.wait_until(seen, "metrics of the run", timeout_s=60)
    values = dict(re.findall(r'ray_steadfast_(\w+){[^}]*run="seen"[^}]*} (\S+)', page))
    assert float(values["world_size"]) == 2
    assert float(values["step"]) >= 5
    assert 0 < float(values["loss"]) < 10
    assert float(values["samples_per_s"]) > 0
    assert 0 <= float(values["goodput"]) <= 1
    running.interrupt()
    assert running.wait(60).code == 3
