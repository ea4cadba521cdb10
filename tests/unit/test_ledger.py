"""What is read back of a ledger, and of events, without reading all of it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from app.run.directory import STEPS, RunDirectory
from app.run.events import Checkpoint, Rollback
from app.run.ledger import PastLosses, past_losses
from app.storage import LocalStore
from app.storage.jsonl import last_lines, open_stream


def test_past_losses_are_those_that_hold_in_the_order_of_steps(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert past_losses(store, 9) == PastLosses()
    losses = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (2, 2.5), (3, None), (4, float("nan")), (5, 5.0), (6, 6.0)]
    with closing(open_stream(store, STEPS)) as stream:
        stream.write({"step": step, "loss": loss} for step, loss in losses)
    assert past_losses(store, 5) == PastLosses([1.0, 2.5, 5.0], [1.0, 2.5, 5.0])


def test_of_a_long_ledger_the_first_and_the_last_losses_are_read(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with closing(open_stream(store, STEPS)) as stream:
        stream.write({"step": step, "loss": float(step)} for step in range(1, 20_001))
    past = past_losses(store, 19_990)
    assert past.first[:32] == [float(step) for step in range(1, 33)]
    assert past.recent[-1] == 19_990.0
    assert len(past.first) < 2000
    assert len(past.recent) < 6000


def test_only_whole_lines_are_among_the_last(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with closing(open_stream(store, "lines")) as stream:
        stream.write({"number": number} for number in range(100))
    with (tmp_path / "lines").open("ab") as file:
        file.write(b'{"number": 1')
    for num_bytes in range(1, 60):
        found = [line["number"] for line in last_lines(store, "lines", num_bytes)]
        assert found == list(range(100 - len(found), 100))
    assert len(last_lines(store, "lines")) == 100


def test_skipped_steps_are_those_of_all_rollbacks(tmp_path: Path) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    assert directory.skipped_steps() == frozenset()
    directory.record(Rollback(steps=(41,), cause="loss nan"))
    directory.record(Checkpoint(step=5, path="step-5", seconds=0.1, blocked_s=0.0, bytes=1))
    directory.record(Rollback(steps=(40, 42), cause="loss nan"))
    assert directory.skipped_steps() == {40, 41, 42}
