"""`--job`: training as a Ray job of this machine's cluster, which outlives whoever gave the command."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import time

from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from app.config import Config
from app.errors import UsageError
from app.interrupts import EXIT_STOPPED
from app.rundir import RunDirectory

_RUN = "run"  # what a job's metadata say it is of
_POLL_S = 0.2


def run_as_job(config: Config, arguments: list[str]) -> int:
    """Submits a command, unless its run is under way as a job already, and shows what that says.

    Returns:
        The exit code of the command once it has ended.

    Raises:
        UsageError: there is no cluster here.
    """
    for name in ("job.sdk", "dashboard_sdk"):  # which tell of their connections
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)
    try:
        client = JobSubmissionClient()
    except ConnectionError as error:
        raise UsageError(f"--job needs a Ray cluster with its dashboard on this machine: {error}") from error
    run = RunDirectory.of(config).uri
    job = _under_way(client, run)
    if job is None:
        command = shlex.join([sys.executable, "main.py", *arguments])
        job = client.submit_job(
            entrypoint=f"cd {shlex.quote(os.getcwd())} && exec {command}",
            submission_id=f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}",
            metadata={_RUN: run},
        )
    print(f"job {job} on {os.uname().nodename}; ray job stop {job} stops it there", flush=True)
    return asyncio.run(_follow(client, job))


def _under_way(client: JobSubmissionClient, run: str) -> str | None:
    def is_it(job: JobDetails) -> bool:
        return (job.metadata or {}).get(_RUN) == run and not job.status.is_terminal()

    return next((job.submission_id for job in client.list_jobs() if is_it(job)), None)


async def _follow(client: JobSubmissionClient, job: str) -> int:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)
    while not (info := client.get_job_info(job)).status.is_terminal():  # its last words come before its end
        await asyncio.sleep(_POLL_S)
    return exit_code(info)


def exit_code(info: JobDetails) -> int:
    """Of the command that a job was; Ray does not keep that of one it was asked to stop."""
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    return {JobStatus.SUCCEEDED: 0, JobStatus.STOPPED: EXIT_STOPPED}.get(info.status, 1)
