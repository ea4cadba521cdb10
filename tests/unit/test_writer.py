"""What happens to states that storage is slow with, or refuses. Threads meet at events; nothing sleeps."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from steadfast.checkpoint.manifest import FileDigest, Manifest
from steadfast.checkpoint.shards import FileLayout, Shard
from steadfast.checkpoint.writer import PendingWrite, Writer
from steadfast.run.events import Checkpoint, Event
from steadfast.units import size

LONG_S = 10.0


class Storage:
    """Writes when it is told to: `begun` says what it is at. `write` is the test's own part in it."""

    compares = False

    def __init__(self, refuses: int = 0, write: Callable[[PendingWrite], object] = PendingWrite.check) -> None:
        self.go, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.refuses, self.write = refuses, write
        self.done: list[int] = []

    def agree(self, pending: PendingWrite) -> bool:
        raise NotImplementedError

    def write_file(self, pending: PendingWrite, number: int) -> tuple[str, FileDigest]:
        self.begun.release()
        assert self.go.acquire(timeout=LONG_S)
        self.write(pending)
        if self.refuses:
            self.refuses -= 1
            raise OSError("No space left on device")
        return f"file-{number}", FileDigest("", 0)

    def commit(self, pending: PendingWrite, attempt: int) -> Manifest | None:
        assert pending.file
        self.done.append(pending.step)
        return Manifest(pending.step, attempt, 1, 0.0, "", dict([pending.file]))

    def finish(self, pending: PendingWrite, manifest: Manifest) -> Event:
        return Checkpoint(step=pending.step, path="", seconds=0.0, blocked_s=0.0, bytes=0)


class Compares(Storage):
    """Storage for states that the ranks compare, as `agrees` says."""

    compares = True

    def __init__(self, agrees: Callable[[PendingWrite], bool]) -> None:
        super().__init__()
        self.agrees = agrees
        self.go.release()

    def agree(self, pending: PendingWrite) -> bool:
        return self.agrees(pending)


def shards(value: float) -> list[Shard]:
    return [Shard("w", torch.full((3,), float(value)), (3,), (0,))]


def put(writer: Writer, storage: Storage, *steps: int) -> None:
    for step in steps:
        writer.put(step, shards(step), {}, storage)


def steps_of(news: list[Event]) -> list[int]:
    return [each.step for each in news if isinstance(each, Checkpoint)]


def nothing() -> None:
    pass


def begun(storage: Storage) -> Writer:
    """Return a writer that is in the midst of writing a state."""
    writer = Writer()
    put(writer, storage, 1)
    assert storage.begun.acquire(timeout=LONG_S)
    return writer


def test_training_goes_on_and_the_newest_of_those_that_wait_wins() -> None:
    """What is under way is not overwritten meanwhile."""
    seen: list[list[float]] = []

    def write(pending: PendingWrite) -> None:
        seen.append(torch.frombuffer(bytearray(b"".join(pending.chunks())[-12:]), dtype=torch.float32).tolist())

    writer = begun(storage := Storage(write=write))
    put(writer, storage, 2, 3, 4)
    assert writer.busy
    assert writer.news() == []
    assert not writer.wait(nothing, 0.1), "storage does not answer"
    storage.go.release(2)
    assert writer.wait(nothing, LONG_S)
    assert storage.done == [1, 4]
    assert steps_of(writer.news()) == [1, 4]
    assert seen == [[1.0] * 3, [4.0] * 3]


@pytest.mark.parametrize("device", [None, torch.device("cuda", 0)])
def test_pinned_memory_has_room_for_both_buffers(monkeypatch: pytest.MonkeyPatch, device: torch.device | None) -> None:
    pinned: list[tuple[str, torch.device, int]] = []

    def pin(memory: torch.Tensor, device: torch.device) -> None:
        pinned.append((threading.current_thread().name, device, memory.nbytes))

    monkeypatch.setattr("steadfast.checkpoint.shards.pin", pin)
    monkeypatch.setattr(FileLayout, "device", device)
    writer, num_bytes = Writer(), FileLayout.of(shards(1.0)).num_bytes
    writer.reserve(shards(1.0))
    for thread in threading.enumerate():
        if thread.name == "reserve":
            thread.join()
    assert [len(buffer._memory) for buffer in writer._buffers] == [num_bytes, num_bytes if device else 0]
    assert pinned == ([("reserve", device, num_bytes)] * 2 if device else [])


def test_a_writer_that_has_nothing_left_to_write_is_freed_with_its_buffers() -> None:
    writer = begun(storage := Storage())
    storage.go.release()
    assert writer.wait(nothing, LONG_S)
    for thread in threading.enumerate():
        if thread.name == "checkpoints":
            thread.join(LONG_S)
    gone = weakref.ref(writer)
    del writer
    gc.collect()
    assert gone() is None


def test_what_storage_refuses_is_tried_again_and_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.checkpoint.writer._FIRST_DELAY_S", 0.01)
    writer, storage = Writer(), Storage(refuses=3)
    storage.go.release(4)
    put(writer, storage, 1)
    assert writer.wait(nothing, LONG_S)
    failed, committed = (each.to_line() for each in writer.news())
    assert (failed["event"], committed["event"]) == ("checkpoint_failed", "checkpoint")
    assert (failed["step"], failed["error"]) == (1, "No space left on device")
    assert failed["needed_bytes"] > 12
    assert failed["text"] == (
        "checkpoint at step 1 is not written; training continues, and a retry or the next checkpoint follows: "
        f"No space left on device ({size(failed['needed_bytes'])} are needed)"
    )
    assert writer.refused == ""


@pytest.mark.parametrize("drops", [False, True], ids=["newer", "dropped"])
def test_a_state_that_storage_refuses_is_not_tried_again_once_it_is_dropped_or_a_newer_one_comes(drops: bool) -> None:
    tries: list[int] = []
    # Refused before it has looked at a chunk, and so without asking `check`.
    writer = begun(storage := Storage(refuses=1, write=lambda pending: tries.append(pending.step)))
    if drops:
        writer.drop()
    put(writer, storage, 2)
    storage.go.release(3)
    assert writer.wait(nothing, LONG_S)
    assert (tries, storage.done) == ([1, 2], [2])


def test_what_is_dropped_is_not_committed() -> None:
    writer = begun(storage := Storage())
    put(writer, storage, 2)
    writer.drop()
    assert not writer.busy
    put(writer, storage, 3)
    storage.go.release(2)
    assert writer.wait(nothing, LONG_S)
    assert storage.done == [3]


def test_what_is_not_storage_s_is_raised() -> None:
    writer = begun(storage := Storage(write=lambda _: 1 / 0))
    storage.go.release()
    with pytest.raises(ZeroDivisionError):
        writer.wait(nothing, LONG_S)


def test_a_state_is_committed_only_once_the_ranks_agree() -> None:
    """One that differs is dropped and told of; one that was not compared in its attempt is dropped with it."""
    writer, asked, go = Writer(), threading.Event(), threading.Event()
    agreeing, differing = Compares(lambda pending: True), Compares(lambda pending: False)

    def ask(pending: PendingWrite) -> bool:
        asked.set()
        return go.wait(LONG_S)

    put(writer, agreeing, 1)
    assert writer.wait(nothing, LONG_S)
    assert (agreeing.done, writer.differs) == ([1], False)
    put(writer, differing, 2)
    assert writer.wait(nothing, LONG_S)
    assert (differing.done, writer.differs, writer.committed) == ([], True, 1)
    put(writer, late := Compares(ask), 3)
    assert asked.wait(LONG_S)
    writer.begin_attempt(2, frozenset(), commits_alone=True)
    assert not writer.differs
    go.set()
    put(writer, agreeing, 4)
    agreeing.go.release()
    assert writer.wait(nothing, LONG_S)
    assert (late.done, agreeing.done) == ([], [1, 4])
