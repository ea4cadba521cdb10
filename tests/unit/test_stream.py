"""Lines that are only added to, whatever the disk says."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.files import last_line, last_lines, read_lines
from app.stream import Stream


class Disk:
    """Takes so many bytes, and then refuses."""

    def __init__(self, room: int) -> None:
        self.room, self.data = room, b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError("No space left on device")
        taken = data[: self.room]
        self.data += taken
        self.room -= len(taken)
        return len(taken)


def test_what_does_not_fit_goes_before_the_next_lines(tmp_path: Path) -> None:
    stream = Stream(tmp_path / "lines")
    stream._file = disk = Disk(room=14)  # type: ignore[assignment]
    stream.write([{"n": 1}])
    stream.write([{"n": 2}, {"n": 3}])
    assert disk.data == b'{"n":1}\n{"n":2'
    disk.room = 100
    stream.write([{"n": 4}])
    assert disk.data.splitlines() == [b'{"n":1}', b'{"n":2}', b'{"n":3}', b'{"n":4}']


@pytest.mark.parametrize("left", [b'{"n":1}\n{"n":', b'{"n":1}\n{"n":2}', b'{"n":1}\n'])
def test_a_line_that_was_cut_short_spoils_no_other(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(left)
    stream = Stream(path)
    stream.write([{"n": 3}])
    stream.close()
    found = [line["n"] for line in read_lines(path)]
    assert found[0] == 1
    assert found[-1] == 3
    assert last_line(path) == {"n": 3}
    assert [line["n"] for line in last_lines(path)] == found
