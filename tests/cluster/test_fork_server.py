"""The fork server starts workers as the raylet would, and only those that a fork can serve."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from steadfast.orchestration import fork_worker
from steadfast.orchestration.fork_server import ForkServer, _Server
from tests.support.checks import check_stopped
from tests.support.command import FOR_EVER, Commands
from tests.support.leftovers import wait_until_gone

WORKER = """
import json, os, random, resource, signal, sys, time
forked = "torch" in sys.modules and "ray" in sys.modules
import numpy, ray
print(json.dumps({
    "forked": forked,
    "argv": sys.argv[1:],
    "variable": os.environ.get("OF_THE_RUN"),
    "folder": os.getcwd(),
    "draws": [ray.UniqueID.from_random().hex(), numpy.random.random(), random.random()],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "descriptors": sorted(int(each) for each in os.listdir("/proc/self/fd")),
    "main": sys.modules["__main__"].__file__,
    "pid": os.getpid(),
    "group": os.getpgrp(),
    "parent": os.getppid(),
}), flush=True)
time.sleep(float(os.environ.get("SLEEP_S", "0")))
sys.exit(7)
"""
ADDRESS = f"steadfast-test-{os.getpid()}"
PLAIN = """import sys; print('{"forked": false}'); sys.exit(8)"""  # stands for Ray's setup_worker.py


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(1, ADDRESS)
    yield server
    server.close()


class Raylet:
    """Starts a worker as an embedded raylet does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._script = folder / "default_worker.py"
        self._script.write_text(WORKER)
        (folder / "setup_worker.py").write_text(PLAIN)
        self._environment = os.environ | {"RAY_RAYLET_PID": "1", "RAY_JOB_ID": "01000000"}
        self._environment[fork_worker.ADDRESS_VARIABLE] = ADDRESS

    def start(self, context: dict[str, Any] | None = None, **variables: str) -> subprocess.Popen[str]:
        stated = f"--serialized-runtime-env-context={json.dumps(context or {})}"
        return subprocess.Popen(
            [sys.executable, fork_worker.__file__, str(self._script), "--node-id=0", stated, "--language=PYTHON"],
            env=self._environment | variables,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, context: dict[str, Any] | None = None, **variables: str) -> tuple[dict[str, Any], int]:
        process = self.start(context, **variables)
        printed, _ = process.communicate(timeout=120)
        return json.loads(printed), process.returncode


@pytest.fixture
def raylet(server: ForkServer, tmp_path: Path) -> Raylet:
    return Raylet(tmp_path)


def test_a_worker_runs_as_if_the_raylet_had_started_it(raylet: Raylet, tmp_path: Path) -> None:
    found, exit_code = raylet.run({"env_vars": {"OF_THE_RUN": "7"}})
    assert (found["forked"], exit_code) == (True, 7)
    assert found["argv"] == ["--node-id=0"], "without what Ray's own program reads"
    assert (found["variable"], found["folder"]) == ("7", str(tmp_path))
    assert found["main"] == str(tmp_path / "default_worker.py")
    assert not {signal.SIGTERM, signal.SIGINT} & set(found["blocked"]), "which the server blocks"
    assert found["group"] == found["pid"], "whose processes the raylet ends with the worker"
    assert found["descriptors"][:3] == [0, 1, 2]
    assert len(found["descriptors"]) == 4, "the fourth lists them"


@pytest.mark.parametrize(
    ("context", "variables"),
    [
        ({"env_vars": {"OMP_NUM_THREADS": "3"}}, {}),
        ({"env_vars": {"OF_THE_RUN": "${HOME}"}}, {}),
        ({"py_executable": "another python"}, {}),
        ({"command_prefix": ["nice"]}, {}),
        ({}, {"RAY_RAYLET_PID": "2"}),
        ({}, {fork_worker.ADDRESS_VARIABLE: f"{ADDRESS}-nowhere"}),
    ],
    ids=["threads", "variable", "python", "prefix", "another raylet", "no server"],
)
def test_a_worker_that_no_fork_can_serve_is_started_by_ray(
    raylet: Raylet, context: dict[str, Any], variables: dict[str, str]
) -> None:
    assert raylet.run(context, **variables) == ({"forked": False}, 8)


def test_what_another_program_of_the_user_sends_is_no_request_and_ends_no_server() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{ADDRESS}-odd")
        listener.listen()
        server = _Server(listener, {}, os.getpid())
        for text in (b"", b"{}", b"5", b"[]", b"\xff", b'{"environment": 5}', b"[" * 50_000):
            with socket.socket(socket.AF_UNIX) as program:
                program.connect(f"\0{ADDRESS}-odd")
                program.sendall(len(text).to_bytes(fork_worker._SIZE_BYTES) + text)
                assert server._accept(listener) is None
                assert program.recv(1) == b""
        server._close()


def test_workers_may_open_as_many_files_as_the_raylet_and_draw_different_numbers(raylet: Raylet) -> None:
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (former[0] - 1, former[1]))
    try:
        first, second = (raylet.run()[0] for _ in range(2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, former)
    assert [(each["forked"], each["open_files"]) for each in (first, second)] == [(True, former[0] - 1)] * 2
    assert not set(first["draws"]) & set(second["draws"])


def test_a_worker_ends_with_the_process_that_the_raylet_knows(raylet: Raylet) -> None:
    process = raylet.start(SLEEP_S="60")
    assert process.stdout is not None
    pid = json.loads(process.stdout.readline())["pid"]
    process.kill()
    process.wait()
    wait_until_gone([pid], 10)


def test_workers_of_a_cluster_are_forks_of_one_server_that_ends_with_the_raylet(tmp_path: Path) -> None:
    script = tmp_path / "default_worker.py"
    script.write_text(WORKER)
    with subprocess.Popen(["sleep", "600"]) as raylet:
        environment = {**os.environ, "RAY_RAYLET_PID": str(raylet.pid), "RAY_JOB_ID": "01000000"}
        start = [sys.executable, "-m", fork_worker.__name__, "--num-threads=1"]
        other = subprocess.run([*start, "3.1", str(script)], env=environment, capture_output=True, text=True)
        assert other.stderr.endswith(f"is Python {fork_worker.VERSION}, and the command has Python 3.1\n")
        command = [*start, fork_worker.VERSION, str(script), "--node-id=0"]
        workers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        found = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
        assert [each["forked"] for each in found] == [True] * 3
        assert len({each["parent"] for each in found}) == 1
        assert [worker.returncode for worker in workers] == [7] * 3
        server = psutil.Process(found[0]["parent"])
        raylet.kill()
    server.wait(10)


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_a_worker_that_joins_on_a_cluster_is_a_fork(on_head: Commands) -> None:
    running = on_head().start(FOR_EVER, "scaling.num_workers=[1,2]")
    running.wait_for_event("attempt_started", attempt=1, world_size=2)
    parents = {psutil.Process(pid).ppid() for pid in running.worker_pids()}
    assert len(parents) == 1
    assert "fork_server" in " ".join(psutil.Process(parents.pop()).cmdline())
    check_stopped(running)


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_workers_of_an_embedded_ray_are_forks_and_without_the_server_others_replace_them(command: Commands) -> None:
    # Without `warm`, since the command's own processes would be forks of that server.
    running = command(warm=None).start(FOR_EVER, "scaling.num_workers=[1,2]")
    running.wait_for_event("attempt_started", attempt=1, world_size=2, timeout_s=120)
    killed, survivor = (psutil.Process(pid) for pid in running.worker_pids())
    server = killed.parent()
    assert server is not None
    assert server == survivor.parent()
    assert "fork_server" in " ".join(server.cmdline())
    server.kill()
    killed.kill()
    running.wait_for_event("attempt_started", attempt=2, world_size=1, source="rank 0")
    running.wait_for_event("attempt_started", attempt=3, world_size=2, source="rank 0")
    assert survivor.is_running(), "the death of the server ends no worker"
    check_stopped(running, lost_steps=0)
