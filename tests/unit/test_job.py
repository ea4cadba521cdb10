"""A command that follows a job, without Ray."""

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from ray.job_submission import JobStatus

from steadfast.errors import TrainingError, UsageError
from steadfast.launch import job as subject
from steadfast.run.directory import RunDirectory


def test_a_head_that_is_gone_is_told_in_one_message_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.at(str(tmp_path))
    metadata = {"run": directory.uri}

    async def tail(_: str) -> AsyncIterator[str]:
        yield "step 10\n"
        raise ConnectionResetError("Cannot write to closing transport")

    under_way = SimpleNamespace(metadata=metadata, status=JobStatus.RUNNING, submission_id="run-1")
    client = SimpleNamespace(list_jobs=lambda: [under_way], tail_job_logs=tail)
    monkeypatch.setattr(subject, "JobSubmissionClient", lambda: client)
    with pytest.raises(TrainingError, match=r"connection to the head was lost\. .* the same command then resumes"):
        subject.run_as_job(directory, {}, [])


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("folder", ["a b", "it's", "$HOME"])
def test_job_deletes_the_file_of_secrets_whatever_its_path_and_also_where_the_jobs_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, is_gone: bool
) -> None:
    temporary, own = tmp_path / folder, tmp_path / "own"
    temporary.mkdir()
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.chdir(own)
    monkeypatch.setattr(subject, "program", lambda: ["-c", "import os; print(os.environ['TOKEN'])"])
    client = Mock()
    subject._submit(client, RunDirectory.at(str(tmp_path / "run")), [], {"TOKEN": "secret"})
    if is_gone:
        own.rmdir()
    entrypoint = client.submit_job.call_args.kwargs["entrypoint"]
    ended = subprocess.run(entrypoint, shell=True, capture_output=True, text=True, cwd=tmp_path)
    assert not list(temporary.iterdir())
    assert ended.stdout == ("" if is_gone else "secret\n")


def test_a_ray_without_its_jobs_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    said = RuntimeError("The Ray jobs CLI & SDK require the ray[default] installation")
    monkeypatch.setattr(subject, "JobSubmissionClient", Mock(side_effect=said))
    with pytest.raises(UsageError, match=r"^--job: The Ray jobs .*\. .* pip install 'steadfast\[cluster\]'$"):
        subject.run_as_job(RunDirectory.at("runs/run"), {}, [])
