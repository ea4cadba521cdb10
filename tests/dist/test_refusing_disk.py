"""A disk that is full, or that may only be read: training goes on, says so, and loses nothing. On real file systems."""

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from steadfast.checkpoint.catalog import Catalog, of_attempt, path_of
from steadfast.run.directory import RunDirectory
from steadfast.storage import LocalStore
from steadfast.storage.jsonl import FileStream
from tests.support.claims import check_checkpoint, check_run, check_weights
from tests.support.drill import Drilled, drill
from tests.support.events import event_lines
from tests.support.reference import reference
from tests.support.small import small

NUM_STEPS = 60
# Slow enough for the disk to be mended while steps are left.
WORDS = [
    f"run.steps={NUM_STEPS}",
    "checkpoint.every=5 steps",
    "faults.inject=[{kind: slow_at, step: 1, ranks: [0], ms: 20}]",
]
LONG_S = 60.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of a few megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield place
    subprocess.run(["umount", "--recursive", "--lazy", place], check=True)


def test_a_full_disk(disk: Path, tmp_path: Path) -> None:
    """Neither a checkpoint nor a line of the ledger fits on it for a while."""
    filler, refused = disk / "filler", tmp_path / "refused"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def has_been_full() -> bool:
        return refused.exists() and len(refused.read_text()) >= 20

    run = trained_while(disk, fill, has_been_full, filler.unlink, partial(count_refusals, refused))
    assert any("No space left on device" in error for error in run.told("checkpoint_failed", "error"))
    assert all(needed > 1000 for needed in run.told("checkpoint_failed", "needed_bytes"))


def refuse_the_first_attempt() -> None:
    honest = LocalStore.write

    def write(store: LocalStore, name: str, parts: Any) -> None:
        if of_attempt(1) in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        honest(store, name, parts)

    LocalStore.write = write  # type: ignore[assignment]


def test_shards_that_storage_does_not_take_are_no_reason_to_end_when_a_worker_leaves(tmp_path: Path) -> None:
    """What the next world goes on from is a copy in memory, of one of the steps before."""
    config = small(tmp_path, "parallel.kind=fsdp", "recovery.wait_s=1")
    run = drill(config, worlds=[3, 2], leave_after=[8], patch=refuse_the_first_attempt)
    check_weights(run, reference(config))
    check_checkpoint(run)
    assert run.told("restore", "source") == ["snapshot"]
    assert "No space left on device" in run.told("checkpoint_failed", "error")[0]


def count_refusals(path: Path) -> None:
    """One character for each time that a stream kept lines back."""
    honest = FileStream.write

    def write(self: FileStream, lines: Iterable[dict[str, Any]]) -> None:
        honest(self, lines)
        if self._backlog:
            with path.open("a") as file:
                file.write("x")

    FileStream.write = write


def test_a_folder_that_may_only_be_read(disk: Path) -> None:
    folder = disk / "small" / "checkpoints"

    def forbid() -> None:
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)

    def has_been_refused() -> bool:
        return told(disk, "checkpoint_failed")

    run = trained_while(disk, forbid, has_been_refused, lambda: subprocess.run(["umount", folder], check=True))
    assert any("Read-only file system" in error for error in run.told("checkpoint_failed", "error"))


def trained_while(
    disk: Path,
    breaks: Callable[[], object],
    has_told: Callable[[], bool],
    mends: Callable[[], object],
    patch: Callable[[], None] | None = None,
) -> Drilled:
    """A run whose disk breaks after its first checkpoint, and is mended once that has told."""
    failures: list[str] = []

    def meddle() -> None:
        for condition, act in ((lambda: told(disk, "checkpoint"), breaks), (has_told, mends)):
            if not awaited(condition):
                failures.append(act.__name__)
            act()

    meddler = threading.Thread(target=meddle)
    meddler.start()
    config = small(disk, *WORDS)
    run = drill(config, worlds=[2], patch=patch)
    meddler.join()
    assert failures == []
    check_run(run, reference(config))
    assert run.told("checkpoint", "step")[-1] == NUM_STEPS
    assert len(run.told("checkpoint_failed", "step")) == 1, "once a minute is enough"
    check_that_nothing_else_lies_there(Catalog(RunDirectory.of(config).store))
    return run


def check_that_nothing_else_lies_there(catalog: Catalog) -> None:
    """Tries that fail must not fill what room there is."""
    for step in catalog.steps():
        manifest = catalog.manifest(step)
        assert manifest is not None
        assert {*catalog.store.list(path_of(step))} == {"manifest.json", *manifest.files}


def awaited(condition: Callable[[], bool]) -> bool:
    pause = threading.Event()
    return any(condition() or pause.wait(0.02) for _ in range(int(LONG_S / 0.02)))


def told(disk: Path, name: str) -> bool:
    return any(event["event"] == name for event in event_lines(RunDirectory(LocalStore(disk / "small"))))


def test_a_file_of_more_than_two_gigabytes_is_read_whole(tmp_path: Path) -> None:
    """A system call returns no more than 2 GiB less a page."""
    with (tmp_path / "file").open("wb") as file:
        file.seek(2**31 + 2)
        file.write(b"end")
    data = LocalStore(tmp_path).read("file", 1)
    assert (len(data), data[-3:]) == (2**31 + 4, b"end")
