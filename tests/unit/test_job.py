"""A command that follows a job, without Ray."""

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


def test_a_ray_without_its_jobs_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    said = RuntimeError("The Ray jobs CLI & SDK require the ray[default] installation")
    monkeypatch.setattr(subject, "JobSubmissionClient", Mock(side_effect=said))
    with pytest.raises(UsageError, match=r"^--job: The Ray jobs .*\. .* pip install 'steadfast\[cluster\]'$"):
        subject.run_as_job(RunDirectory.at("runs/run"), {}, [])
