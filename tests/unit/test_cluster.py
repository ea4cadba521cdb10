"""Which Ray a command joins, without any: only sockets that answer, or do not."""

import contextlib
import os
import socket
import socketserver
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from ray._private import services

from steadfast.config import ClusterConfig, parse_config
from steadfast.errors import UsageError
from steadfast.orchestration import cluster
from steadfast.orchestration.cluster import find_cluster


@pytest.fixture(autouse=True)
def no_clusters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where `ray start` writes its address down
    (tmp_path / "ray").mkdir()


def written_down(folder: Path, address: str) -> None:
    (folder / "ray" / "ray_current_cluster").write_text(address)


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_program_whose_ray_runs_is_told_which_keys_come_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get_runtime_context", lambda: Mock(gcs_address="10.0.0.1:6379"))
    monkeypatch.delenv("RAY_CHDIR_TO_TRIAL_DIR", raising=False)
    with cluster.restored_settings():
        assert cluster.running_cluster(ClusterConfig()) == "10.0.0.1:6379"
        assert os.environ["RAY_CHDIR_TO_TRIAL_DIR"] == "0"
    assert "RAY_CHDIR_TO_TRIAL_DIR" not in os.environ
    late = ClusterConfig(address="local", env={"A": "b"}, pip=("einops",))
    with pytest.raises(
        UsageError, match=r"^cluster\.address, cluster\.env, cluster\.pip: Ray is running .*runtime_env="
    ):
        cluster.running_cluster(late)


@contextlib.contextmanager
def serve(answer: bytes) -> Iterator[str]:
    """Answer each connection with these bytes."""

    class Answering(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):  # the connection may be closed at once
                self.request.sendall(answer)
                self.request.recv(100)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answering) as server, ThreadPoolExecutor() as threads:
        threads.submit(server.serve_forever, 0.01)
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


GRPC = b"\0\0\0\4\0\0\0\0\0"
SSH = b"SSH-2.0-OpenSSH_9.2p1\r\n"


def test_auto_embeds_one_where_nobody_has_started_any() -> None:
    assert find_cluster("auto") is None


def test_auto_leaves_a_ray_alone_that_another_command_has_embedded() -> None:
    with serve(GRPC) as address:
        # What Ray itself goes by, and would join: a process of this name, which says where its GCS is.
        command = ["bash", "-c", f"exec -a 'raylet/raylet --gcs-address={address}' sleep 60"]
        with subprocess.Popen(command) as embedded:
            try:
                wait_until_ray_finds(address)
                assert find_cluster("auto") is None
            finally:
                embedded.kill()


def wait_until_ray_finds(address: str) -> None:
    until_s = time.monotonic() + 10.0
    while address not in services._find_address_from_flag("--gcs-address"):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_auto_joins_what_ray_start_wrote_down_unless_it_was_killed(tmp_path: Path, closed_port: int) -> None:
    with serve(GRPC) as address:
        written_down(tmp_path, address)
        assert find_cluster("auto") == address
    written_down(tmp_path, f"127.0.0.1:{closed_port}")
    assert find_cluster("auto") is None


def test_slow_cluster_is_not_taken_for_one_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.3)
    with serve(SSH) as address:
        written_down(tmp_path, address)
        with pytest.raises(UsageError, match=r"ray_current_cluster=.*ray stop"):
            find_cluster("auto")


def test_the_variable_comes_before_it_and_the_configuration_before_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(GRPC) as written, serve(GRPC) as variable, serve(GRPC) as configured:
        written_down(tmp_path, written)
        monkeypatch.setenv("RAY_ADDRESS", variable)
        assert find_cluster("auto") == variable
        assert find_cluster(configured) == configured
        assert find_cluster("local") is None
        monkeypatch.setenv("RAY_ADDRESS", "local")
        assert find_cluster("auto") is None
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        assert find_cluster("auto") == written


@pytest.mark.parametrize("address", ["garbage", "host", "host:port", "1.2.3.4:", ":6379", "http://x:1/y", "a b:1"])
@pytest.mark.parametrize("by", ["RAY_ADDRESS", "cluster.address"])
def test_what_is_no_address_is_told_at_once(monkeypatch: pytest.MonkeyPatch, address: str, by: str) -> None:
    if by == "RAY_ADDRESS":
        monkeypatch.setenv(by, address)
    with pytest.raises(UsageError, match="must be HOST:PORT") as raised:
        find_cluster("auto" if by == "RAY_ADDRESS" else address)
    assert f"{by}={address}" in str(raised.value)


@pytest.mark.parametrize("answer", [None, SSH])
def test_where_no_ray_answers_one_error_says_so_soon(
    monkeypatch: pytest.MonkeyPatch, closed_port: int, answer: bytes | None
) -> None:
    monkeypatch.setattr(cluster, "_POLL_S", 0.05)
    monkeypatch.setattr(cluster, "_ANSWER_S", 0.3)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        address = f"127.0.0.1:{closed_port}" if answer is None else stack.enter_context(serve(answer))
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UsageError, match="no Ray answers there") as raised:
            find_cluster("auto")
    assert "correct RAY_ADDRESS" in str(raised.value)
    assert time.monotonic() - began_s < 15.0


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        ({"CPU": 4.0, "GPU": 2.0}, "Ray: 192.0.2.10:6379, 2 nodes, 4 CPUs, 2 GPUs"),
        ({"CPU": 1.0}, "Ray: 192.0.2.10:6379, 2 nodes, 4 CPUs (1 free), 2 GPUs (0 free)"),
    ],
)
def test_the_first_line_says_what_a_command_will_wait_for(
    monkeypatch: pytest.MonkeyPatch, free: dict[str, float], expected: str
) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}}] * 2
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0, "GPU": 2.0})
    monkeypatch.setattr("ray.available_resources", lambda: free)
    assert cluster.describe_cluster("192.0.2.10:6379") == expected


@pytest.mark.parametrize(("num_gpus", "expected"), [(0, 6), (2, 2)])
def test_an_embedded_ray_has_a_worker_for_each_core_or_each_gpu_by_default(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, expected: int
) -> None:
    nodes: list[dict[str, object]] = []

    def start(num_cpus: int, _node_ip_address: str, **_: object) -> None:
        # By itself, Ray would make the machine's address of "127.0.0.1", and listen everywhere.
        assert services.resolve_ip_for_localhost(_node_ip_address) == "127.0.0.1"
        nodes.append({"Alive": True, "Resources": {"CPU": num_cpus, "GPU": num_gpus}})

    monkeypatch.setattr(cluster, "_RAY_SETTINGS", {})
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setattr("ray.init", start)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr(cluster, "forked_workers", Mock(return_value=contextlib.nullcontext()))
    config = parse_config("cluster: {address: local}")
    assert cluster.connect(config.cluster, config.scaling, verbose=True) == cluster.EMBEDDED
    gpus = cluster.gpus_per_worker(config.scaling, embedded=True)
    assert cluster.await_room(config.scaling, gpus, Mock(), Mock(), embedded=True) == expected
