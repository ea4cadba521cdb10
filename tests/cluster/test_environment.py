"""Variables of the command that reach the workers, and where their values do not get."""

import json
import uuid
from pathlib import Path

import pytest

from tests.support.checks import check_finished
from tests.support.command import Commands, Head, files_with

SECRET = f"secret-{uuid.uuid4()}"  # not as text here: the working directory goes to the nodes
NAMES = ["TOKEN", "THREADS", "WANDB_API_KEY", "PRIVATE"]
SEEN = {"TOKEN": SECRET, "THREADS": "2", "WANDB_API_KEY": SECRET, "PRIVATE": None, "none": None}


@pytest.mark.ray
def test_workers_see_the_commands_variables_and_nothing_keeps_a_secret(
    on_head: Commands, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOKEN", "WANDB_API_KEY", "PRIVATE"):
        monkeypatch.setenv(name, SECRET)
    task = f"{{target: tests.examples.environment:Seen, args: {{folder: {tmp_path}/seen, names: {NAMES}}}}}"
    run = on_head()
    finished = check_finished(run.start("cluster.env={TOKEN: null, THREADS: 2}", f"task={task}", "run.steps=20"))
    seen = [json.loads(file.read_text()) for file in (tmp_path / "seen").iterdir()]
    assert seen == [SEEN] * 2
    assert files_with(SECRET, run.directory, session_of(head)) == []
    assert SECRET not in finished.output


@pytest.mark.ray
@pytest.mark.slow
def test_workers_of_embedded_ray_see_them(command: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = command()
    task = f"task={{target: tests.examples.environment:Seen, args: {{folder: {tmp_path}/seen, names: {NAMES}}}}}"
    words = ("cluster.env={TOKEN: null, THREADS: 2}", "cluster.pip=einops", "scaling.num_workers=1")
    for name in ("TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, SECRET)
    finished = check_finished(run.start(*words, task, "run.steps=20"))
    assert "cluster.pip: nothing is installed here" in finished.output
    (seen,) = [json.loads(file.read_text()) for file in (tmp_path / "seen").iterdir()]
    assert seen == SEEN
    assert files_with(SECRET, run.directory) == []


def session_of(head: Head) -> Path:
    """Return the folder of a head's logs and sockets."""
    words = Path(f"/proc/{head.pid}/cmdline").read_text().split("\0")
    (folder,) = [word.partition("=")[2] for word in words if word.startswith("--session_dir=")]
    return Path(folder)
