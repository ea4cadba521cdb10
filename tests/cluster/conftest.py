from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.head import serve_head, wait_until_clear
from tests.support.command import Command, Commands, Head, Running


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore files and sockets that Ray, which these tests use in their own process, does not close."""
    item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Commands]:
    """Make commands that share a storage; give each run a name of its own. Those that start Ray embed it."""
    started: list[Running] = []
    yield partial(Command, tmp_path, started=started)
    end_all(started)


@pytest.fixture
def on_head(tmp_path: Path, head: Head) -> Iterator[Commands]:
    """Make commands as `command` does, which run on the shared head: one at a time, and none that loses a node."""
    wait_until_clear(head)
    started: list[Running] = []
    yield partial(Command, tmp_path, head=head, started=started)
    end_all(started)
    wait_until_clear(head)


def end_all(started: list[Running]) -> None:
    """End what a test that failed has left running."""
    for running in started:
        running.end()


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    with serve_head() as head:
        yield head
