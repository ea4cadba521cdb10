"""What is read back of a ledger, and of events, without reading all of it."""

from __future__ import annotations

from pathlib import Path

from app.ledger import recent_losses
from app.rundir import STEPS, RunDirectory
from app.storage import LocalStore
from app.stream import last_lines, open_stream


def test_recent_losses_are_those_that_hold_in_the_order_of_steps(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert recent_losses(store, 9) == []
    losses = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (2, 2.5), (3, None), (4, float("nan")), (5, 5.0), (6, 6.0)]
    open_stream(store, STEPS).write({"step": step, "loss": loss} for step, loss in losses)
    assert recent_losses(store, 5) == [1.0, 2.5, 5.0]


def test_only_whole_lines_are_among_the_last(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    open_stream(store, "lines").write({"number": number} for number in range(100))
    with (tmp_path / "lines").open("ab") as file:
        file.write(b'{"number": 1')
    for num_bytes in range(1, 60):
        found = [line["number"] for line in last_lines(store, "lines", num_bytes)]
        assert found == list(range(100 - len(found), 100))
    assert len(last_lines(store, "lines")) == 100


def test_skipped_steps_are_those_of_all_rollbacks(tmp_path: Path) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    assert directory.skipped_steps() == frozenset()
    directory.record({"event": "rollback", "steps": (41,)})
    directory.record({"event": "checkpoint", "step": 5})
    directory.record({"event": "rollback", "steps": (40, 42)})
    assert directory.skipped_steps() == {40, 41, 42}
