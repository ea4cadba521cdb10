"""How torchrun's ranks begin: by a command of the user's, or once more by one that has the run already."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from app.launch.torchrun import _begun
from app.run.directory import STEPS, RunDirectory
from app.run.events import RunStarted
from app.storage import LocalStore
from app.storage.jsonl import open_stream


@pytest.mark.parametrize(
    ("command_s", "again"),
    [(100.0, True), (140.0, True), (151.0, None)],
    ids=["restarted at once", "a node that came later leads now", "given after the last step"],
)
def test_a_command_that_was_there_before_the_last_step_has_begun_again(
    command_s: float, again: bool | None, tmp_path: Path
) -> None:
    directory = RunDirectory(LocalStore(tmp_path))
    assert _begun(directory, 103.0, 100.0) == RunStarted(time_s=100.0, launcher="torchrun")
    directory.record(_begun(directory, 103.0, 100.0))
    # Even where it has not come to a step: the first beginning is the command's own time.
    assert _begun(directory, 110.0, 100.0) == RunStarted(time_s=110.0, launcher="torchrun", again=True)
    with closing(open_stream(directory.store, STEPS)) as stream:
        stream.write([{"step": 1, "attempt": 1, "time_s": 150.0}])
    begun = _begun(directory, 153.0, command_s)
    assert begun == RunStarted(time_s=153.0 if again else command_s, launcher="torchrun", again=again)
