"""A Ray head that the commands of many tests share: starting one takes longer than most of them train."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from steadfast.orchestration.internals import without_services
from tests.support import head_worker
from tests.support.command import Head, descendants
from tests.support.s3 import CREDENTIALS

NUM_CPUS = 2
_STORE_BYTES = 80 * 2**20  # nothing large travels through Ray's object store
_CLEAR_S = 30.0

# Of a head that nobody uses: its own processes, idle workers, and an actor of Ray Train that stays for the next run.
_RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::_AutoscalingCoordinatorActor")


def work_on(head: Head) -> list[str]:
    """Return the titles of the processes that do something for a command."""
    titles = [title for _, title in descendants(head.pid) if title.startswith("ray::")]
    return [title for title in titles if not title.startswith(_RAYS_OWN)]


def wait_until_clear(head: Head) -> None:
    """Wait until the last command's processes have ended.

    Raises:
        AssertionError: they have not, in half a minute.
    """
    until = time.monotonic() + _CLEAR_S
    while work := work_on(head):
        assert time.monotonic() < until, f"left behind on the shared head: {work}"
        time.sleep(0.05)


@contextmanager
def serve_head() -> Iterator[Head]:
    """Start a head below this process. It ends with the context, or with this process."""
    # The sockets' paths must fit in 107 characters. And here, not in the usual place, Ray notes that this machine
    # belongs to a cluster: no other command on it must join this one by itself.
    with tempfile.TemporaryDirectory(prefix="ray-") as short, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", short)
        for name, value in CREDENTIALS.items():  # workers have the environment of their node, not of the command
            patch.setenv(name, value)
        # Ray appends this name to a folder, so an absolute path replaces the whole path.
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", head_worker.__file__)
        arguments = {"num_cpus": NUM_CPUS, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        with without_services(log_monitor=False):  # as an embedded Ray does
            cluster = Cluster(initialize_head=True, head_node_args=arguments)
        try:
            patch.undo()
            (raylet,) = [pid for pid, title in descendants(os.getpid()) if "raylet/raylet " in title]
            yield Head(str(cluster.address), raylet)
        finally:
            cluster.shutdown()
