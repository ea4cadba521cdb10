"""A run in what Prometheus reads from a Ray node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request

import pytest

from tests.support.command import Commands, Head

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


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
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
