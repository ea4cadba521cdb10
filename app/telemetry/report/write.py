"""Write the report of a run into its directory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.config import Config
from app.errors import UsageError
from app.run.directory import REPORT, RunDirectory

_MOST_STEPS = 500_000  # whose ledger the end of a run reads: more would delay its exit by seconds


def write_report(directory: RunDirectory) -> str:
    """Write the page. Return where it is. Raises UsageError if the run has not begun."""
    from app.telemetry.report.course import Course
    from app.telemetry.report.page import page_of

    course = Course.read(directory)
    if not course.ledger.accounts:
        raise UsageError(f"{directory.uri} has no events: there is nothing to report before the run has begun")
    directory.store.commit(REPORT, page_of(course).encode())
    return directory / REPORT


@contextmanager
def reported(config: Config, directory: RunDirectory, say: Callable[[str], object]) -> Iterator[None]:
    """Write the report once what is within ends, if `run.report` asks for it. What goes wrong with it is a warning."""
    try:
        yield
    finally:
        # Whoever presses Ctrl-C twice waits for nothing.
        if config.run.report and not isinstance(sys.exception(), KeyboardInterrupt):
            try:
                _report(directory, say)
            except Exception as error:
                say(f"warning: no {REPORT}: {type(error).__name__}: {error}")


def _report(directory: RunDirectory, say: Callable[[str], object]) -> None:
    num_steps = int(directory.last_step_line().get("step", 0))
    if num_steps > _MOST_STEPS:
        say(f"no {REPORT} by itself after {num_steps} steps; main.py report {directory.uri} writes it")
    elif num_steps:
        say(f"report      {write_report(directory)}")
