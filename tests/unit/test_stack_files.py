"""Stacks and collectives of hung workers, as files of the run directory."""

from pathlib import Path

from steadfast.liveness.flight_recorder import pack
from steadfast.orchestration.stack_files import StackFiles
from steadfast.storage import LocalStore


def test_stacks_and_collectives_are_written_the_latter_as_torchs_tool_reads_them(tmp_path: Path) -> None:
    files = StackFiles(LocalStore(tmp_path))
    for rank, name in ((1, "b"), (0, "a")):
        progress = {"attempt": 1, "rank": rank}
        files.write(name, {"progress": progress, "collectives": pack(f"of {name}".encode())}, attempt=1)
    files.write("a", {"stacks": "File x, line 1"}, attempt=1)
    files._thread.shutdown()
    folder = tmp_path / "stacks" / "attempt-1-collectives"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"rank-0": "of a", "rank-1": "of b"}
    assert (tmp_path / "stacks" / "attempt-1-a.txt").read_text() == "File x, line 1"
