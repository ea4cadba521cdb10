"""The past of a run, as its events tell it."""

from pathlib import Path

from steadfast.run.directory import RunDirectory
from steadfast.run.events import AttemptEnded, AttemptStarted, Checkpoint, Validation
from steadfast.storage import LocalStore
from steadfast.telemetry.past import Past


def test_the_past_knows_the_newest_checkpoint_and_where_the_last_attempt_trained(tmp_path: Path) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    seconds = dict.fromkeys(("detected_s", "formed_s", "built_s", "restored_s", "first_step_s"), 0.0)
    saved = Checkpoint(step=30, path="", seconds=0.0, blocked_s=0.0, bytes=0)
    started = AttemptStarted(step=0, source="start", world_size=2, nodes={"a": (0,), "b": (1,)}, **seconds)
    for event in (saved, started):
        directory.record(event)
    past = Past.read(directory)
    assert (past.committed, past.num_nodes, past.num_workers, past.kind) == (30, 2, 2, None)
    validated = Validation(step=30, metrics={"loss": 2.0})
    for later in (validated, AttemptEnded(attempt=1, step=40, cause="resized")):
        directory.record(later)
    past = Past.read(directory)
    assert (past.kind, past.validations) == ("resize", ({"loss": 2.0},))
