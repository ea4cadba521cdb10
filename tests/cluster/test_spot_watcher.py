"""A real watcher beside a real Ray node: the cloud announces, Ray drains that node until the announced moment."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import ray
from ray._private.state import state
from ray.cluster_utils import Cluster

from tests.support.command import ROOT
from tests.support.metadata import INSTANCE_ACTION, MetadataService, metadata_service

pytestmark = pytest.mark.ray
WORKER_IP = "127.0.0.2"  # so that head and worker are two machines to Ray


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("HOME", str(tmp_path))  # an authentication token in the real one would be asked for
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # its sockets' paths must fit in 107 characters
        monkeypatch.setenv("RAY_TMPDIR", short)  # here "the cluster this machine belongs to" is written down
        yield from running_cluster()


def running_cluster() -> Iterator[Cluster]:
    started = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 * 2**20},
    )
    try:
        started.add_node(num_cpus=1, object_store_memory=80 * 2**20, node_ip_address=WORKER_IP)
        ray.init(address=started.address, log_to_driver=False)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


@pytest.fixture
def start_watcher(tmp_path: Path, cluster: Cluster) -> Iterator[Callable[[MetadataService], Path]]:
    """Answers where the watcher writes."""
    output, watchers = tmp_path / "watcher.txt", []

    def start(service: MetadataService) -> Path:
        words = [f"--host={service.host}", f"--node-ip={WORKER_IP}", "--poll-interval-s=0.2"]
        command = [sys.executable, "-m", "cluster.spot_watcher", *words]
        with output.open("w") as file:
            watchers.append(subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=file, stderr=file))
        return output

    yield start
    for watcher in watchers:
        assert watcher.poll() is None, output.read_text()
        watcher.kill()
        watcher.wait()


@ray.remote(num_cpus=1)
class Busy:
    """Keeps its node: one that is idle ends as soon as it is drained."""

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def wait_until(condition: Callable[[], bool], output: Path, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.02)


def test_the_announced_node_drains_until_the_announced_moment(
    cluster: Cluster, start_watcher: Callable[[MetadataService], Path]
) -> None:
    (worker,) = cluster.worker_nodes
    busy = Busy.remote()  # type: ignore[attr-defined]
    assert ray.get(busy.node_id.remote()) == worker.node_id
    with metadata_service("aws") as service:
        output = start_watcher(service)
        wait_until(lambda: "no notice of preemption" in output.read_text(), output)
        assert state.get_draining_nodes() == {}

        deadline_s = int(time.time()) + 120
        moment = datetime.fromtimestamp(deadline_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        service.items[INSTANCE_ACTION] = json.dumps({"action": "terminate", "time": moment})
        wait_until(lambda: bool(state.get_draining_nodes()), output)

        draining = state.get_draining_nodes()
        assert list(draining) == [worker.node_id]  # not the head
        assert abs(draining[worker.node_id] / 1000 - deadline_s) < 1
        wait_until(lambda: "Ray drains the node" in output.read_text(), output)
        asked = len(service.asked)
        wait_until(lambda: len(service.asked) > asked + 3, output)  # it polls on
