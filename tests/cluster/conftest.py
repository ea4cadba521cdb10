import fcntl
import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.head import serve_head, wait_until_clear
from tests.support.command import Command, Commands, Head, Running
from tests.support.warm import Warm


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore files and sockets that Ray, which these tests use in their own process, does not close."""
    item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture
def command(tmp_path: Path, warm: Warm) -> Iterator[Commands]:
    """Make commands that share a storage; give each run a name of its own. Those that start Ray embed it."""
    started: list[Running] = []
    yield partial(Command, tmp_path, started=started, warm=warm)
    end_all(started)


@pytest.fixture
def on_head(tmp_path: Path, head: Head, warm: Warm) -> Iterator[Commands]:
    """Make commands as `command` does, which run on the shared head: one at a time, and none that loses a node."""
    wait_until_clear(head)
    started: list[Running] = []
    yield partial(Command, tmp_path, head=head, started=started, warm=warm)
    end_all(started)
    wait_until_clear(head)


def end_all(started: list[Running]) -> None:
    """End what a test that failed has left running."""
    for running in started:
        running.end()


@pytest.fixture(autouse=True)
def neighbours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a test with the marker `alone` run while no other process of pytest-xdist runs one."""
    basetemp = tmp_path_factory.getbasetemp()
    shared = basetemp.parent if "PYTEST_XDIST_WORKER" in os.environ else basetemp
    with (shared / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield
    gc.collect()  # here, where what Ray leaves open is no error, and not in a test of another folder


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    with Warm() as warm:
        yield warm


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    with serve_head() as head:
        yield head
