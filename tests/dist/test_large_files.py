"""Files that are larger than what one system call takes."""

from __future__ import annotations

from pathlib import Path

from steadfast.storage import LocalStore


def test_a_file_of_more_than_two_gigabytes_is_read_whole(tmp_path: Path) -> None:
    """A system call returns no more than 2 GiB less a page."""
    with (tmp_path / "file").open("wb") as file:
        file.seek(2**31 + 2)
        file.write(b"end")
    data = LocalStore(tmp_path).read("file", 1)
    assert (len(data), data[-3:]) == (2**31 + 4, b"end")
