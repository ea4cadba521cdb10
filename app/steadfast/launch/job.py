"""`--job`: train as a Ray job of this machine's cluster.

The job goes on when the terminal of the command is closed.
"""

import asyncio
import logging
import os
import shlex
import sys
import time

from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from steadfast.errors import TrainingError, UsageError
from steadfast.launch.detect import program
from steadfast.launch.handover import source_and_delete, write_variables
from steadfast.run.directory import RunDirectory
from steadfast.run.interrupts import EXIT_STOPPED

# The key in a job's metadata that holds the URI of its run.
_RUN = "run"
_POLL_S = 0.2


def run_as_job(directory: RunDirectory, variables: dict[str, str], arguments: list[str]) -> int:
    """Run a command as a job, show its output, and return its exit code.

    If a job of the same run is active, the output of that job is shown instead.

    Args:
        directory: the run that the command trains.
        variables: environment variables to set for the command.
        arguments: the arguments of the command.

    Raises:
        UsageError: this machine has no Ray cluster with a dashboard.
        TrainingError: the connection was lost.
    """
    # Both modules log each new connection, which would appear between the lines of the run.
    for name in ("job.sdk", "dashboard_sdk"):
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
    try:
        client = JobSubmissionClient()
    except ConnectionError as error:
        raise UsageError(f"--job needs a Ray cluster with its dashboard on this machine: {error}") from error
    except RuntimeError as error:
        raise UsageError(
            f"--job: {error}. Install the packages for Ray's jobs on this machine: pip install 'steadfast[cluster]'"
        ) from error

    job = _find_job(client, directory.uri)
    if job is None:
        job = _submit(client, directory, arguments, variables)
    print(f"job {job} on {os.uname().nodename}; ray job stop {job} stops it there", flush=True)
    try:
        return asyncio.run(_follow(client, job))
    except (OSError, RuntimeError) as error:  # requests and the websocket raise these
        raise TrainingError(
            "the connection to the head was lost. The run goes on there, and the same command shows it. If the head "
            "is gone, start it again (ray up FILE, or ray start --head): the same command then resumes the run"
        ) from error


def _submit(
    client: JobSubmissionClient, directory: RunDirectory, arguments: list[str], variables: dict[str, str]
) -> str:
    file = write_variables(variables)
    command = shlex.join([sys.executable, *program(), *arguments])
    try:
        job: str = client.submit_job(
            # The job runs in this directory, because relative paths would mean other files in Ray's copy of it.
            entrypoint=f"{source_and_delete(shlex.quote(str(file)))}cd {shlex.quote(os.getcwd())} && exec {command}",
            # Ray refuses an id that it knows, even that of a job that has ended.
            submission_id=f"{directory.name}-{time.strftime('%Y%m%d-%H%M%S')}",
            metadata={_RUN: directory.uri},
        )
        return job
    except BaseException:
        file.unlink()  # no job will read and delete the file
        raise


def _find_job(client: JobSubmissionClient, run: str) -> str | None:
    for job in client.list_jobs():
        metadata = job.metadata or {}
        if metadata.get(_RUN) == run and not job.status.is_terminal():
            return str(job.submission_id)
    return None


async def _follow(client: JobSubmissionClient, job: str) -> int:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
    # The output may end a moment before Ray reports the end of the job.
    info = client.get_job_info(job)
    while not info.status.is_terminal():
        await asyncio.sleep(_POLL_S)
        info = client.get_job_info(job)
    return exit_code(info)


def exit_code(info: JobDetails) -> int:
    """Return the exit code of a job's command.

    Raises TrainingError if the command or the process of Ray that watches it was killed.
    """
    if info.driver_exit_code is not None and info.driver_exit_code >= 0:
        return int(info.driver_exit_code)
    # Ray records no exit code for a job that was stopped.
    if info.status == JobStatus.STOPPED:
        return EXIT_STOPPED
    if info.status == JobStatus.SUCCEEDED:
        return 0
    said, _, _ = (info.message or "no message").partition(", last available logs")
    raise TrainingError(f"the job was killed ({said}). The same command resumes the run")
