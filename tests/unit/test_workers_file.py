"""The progress of workers, which the coordinator writes while a user watches."""

from dataclasses import replace
from pathlib import Path

import pytest

from steadfast.orchestration.messages import Member
from steadfast.orchestration.workers_file import WorkersFile
from steadfast.run.watching import WORKERS, mark_watched, pop_mark, read_workers
from steadfast.storage import LocalStore
from steadfast.world.report import ProgressReport

REPORT = ProgressReport(1, 0, [1, 0, 0, 0, 0], 4, "forward", seconds=0.5, limit_s=3.0, spent_s={"forward": 1.0})
MEMBERS = {name: Member(name, None, "node") for name in "ab"}


@pytest.fixture(autouse=True)
def every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.orchestration.workers_file._INTERVAL_S", 0.0)


def test_a_run_that_no_user_watches_writes_nothing(tmp_path: Path) -> None:
    WorkersFile(LocalStore(tmp_path)).update(1, MEMBERS, {"a": REPORT})
    assert list(tmp_path.iterdir()) == []


def test_a_watched_run_shows_each_worker_of_the_attempt_by_rank(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    mark_watched(store)
    file = WorkersFile(store)
    gone = replace(REPORT, rank=2)
    reports = {"b": replace(REPORT, rank=1, phase="loader"), "a": REPORT, "gone": gone}
    file.update(1, MEMBERS, reports)
    assert not pop_mark(store)
    assert [(each.rank, each.name, each.phase, each.own_ms) for each in read_workers(store, 1)] == [
        (0, "a", "forward", None),
        (1, "b", "loader", None),
    ]
    later = {"a": replace(REPORT, step=6, spent_s={"forward": 1.5})}
    file.update(1, MEMBERS, later)
    (worker,) = read_workers(store, 1)
    assert (worker.step, worker.own_ms) == (6, 250.0)
    file.update(2, MEMBERS, later)
    assert read_workers(store, 2) == ()


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"time_s": 0, "attempt": 1, "workers": []}', b'{"workers": 5}']
)
def test_a_file_that_is_damaged_or_old_shows_no_worker(tmp_path: Path, content: bytes) -> None:
    store = LocalStore(tmp_path)
    store.commit(WORKERS, content)
    assert read_workers(store, 1) == ()
