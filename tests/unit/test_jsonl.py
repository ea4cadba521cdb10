"""Lines that are only added to, whatever storage says."""

from pathlib import Path

import pytest

from steadfast.errors import StorageError
from steadfast.storage import LocalStore
from steadfast.storage.jsonl import FileStream, SegmentStream, last_lines, read_lines
from tests.support.memory_store import MemoryStore


class Disk:
    """Takes so many bytes, and then refuses."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.data = b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError("No space left on device")
        taken = data[: self.room]
        self.data += taken
        self.room -= len(taken)
        return len(taken)


def test_what_does_not_fit_goes_before_the_next_lines(tmp_path: Path) -> None:
    stream = FileStream(tmp_path / "lines")
    stream._file.close()
    stream._file = disk = Disk(room=14)  # type: ignore[assignment]
    stream.write([{"n": 1}])
    stream.write([{"n": 2}, {"n": 3}])
    assert disk.data == b'{"n":1}\n{"n":2'
    disk.room = 100
    stream.write([{"n": 4}])
    assert disk.data.splitlines() == [b'{"n":1}', b'{"n":2}', b'{"n":3}', b'{"n":4}']


def test_stream_that_cannot_be_opened_names_its_file_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    with pytest.raises(StorageError, match=r"lines cannot be written: Is a directory\. Make room or remove what"):
        FileStream(tmp_path / "lines")


@pytest.mark.parametrize("left", [b'{"n":1}\n{"n":', b'{"n":1}\n{"n":2}', b'{"n":1}\n'])
def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(left)
    stream = FileStream(path)
    stream.write([{"n": 3}])
    stream.close()
    store = LocalStore(tmp_path)
    found = [line["n"] for line in read_lines(store, "lines")]
    assert found[0] == 1
    assert found[-1] == 3
    assert last_lines(store, "lines")[-1] == {"n": 3}
    assert [line["n"] for line in last_lines(store, "lines")] == found


def test_segments_read_as_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadfast.storage.jsonl._SEGMENT_BYTES", 20)
    monkeypatch.setattr("steadfast.storage.jsonl._UPLOAD_INTERVAL_S", 0.001)
    store = MemoryStore()
    for first in (0, 40):  # a second writer goes on where the first one ended
        stream = SegmentStream(store, "lines")
        for n in range(first, first + 40):
            stream.write([{"n": n}])
        stream.close()
    assert [line["n"] for line in read_lines(store, "lines")] == list(range(80))
    assert last_lines(store, "lines")[-1] == {"n": 79}
    found = [line["n"] for line in last_lines(store, "lines", 100)]
    assert found == list(range(80 - len(found), 80))
    assert len(found) >= 8


def test_a_segment_that_the_bucket_refuses_goes_with_the_next_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(MemoryStore):
        def commit(self, name: str, data: bytes, private: bool = False) -> None:
            if not self.operations:
                self.operations.append(("refused", name))
                raise OSError("503")
            super().commit(name, data)

    monkeypatch.setattr("steadfast.storage.jsonl._UPLOAD_INTERVAL_S", 0.001)
    store = Refusing()
    stream = SegmentStream(store, "lines")
    stream.write([{"n": 1}])
    while not store.operations:
        pass
    stream.write([{"n": 2}])
    stream.close()
    assert [line["n"] for line in read_lines(store, "lines")] == [1, 2]
