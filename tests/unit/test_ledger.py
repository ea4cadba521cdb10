"""What is read back of a ledger, and of events, without reading all of it."""

from __future__ import annotations

from pathlib import Path

from app.files import append_line, last_lines
from app.ledger import recent_losses
from app.rundir import RunDirectory


def test_recent_losses_are_those_that_hold_in_the_order_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert recent_losses(path, 9) == []
    for step, loss in [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 4.0),
        (2, 2.5),
        (3, None),
        (4, float("nan")),
        (5, 5.0),
        (6, 6.0),
    ]:
        append_line(path, {"step": step, "loss": loss})
    assert recent_losses(path, 5) == [1.0, 2.5, 5.0]


def test_only_whole_lines_are_among_the_last(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for number in range(100):
        append_line(path, {"number": number})
    with path.open("ab") as file:
        file.write(b'{"number": 1')
    for num_bytes in range(1, 60):
        found = [line["number"] for line in last_lines(path, num_bytes)]
        assert found == list(range(100 - len(found), 100))
    assert len(last_lines(path)) == 100


def test_skipped_steps_are_those_of_all_rollbacks(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.skipped_steps() == frozenset()
    directory.record({"event": "rollback", "steps": (41,)})
    directory.record({"event": "checkpoint", "step": 5})
    directory.record({"event": "rollback", "steps": (40, 42)})
    assert directory.skipped_steps() == {40, 41, 42}
