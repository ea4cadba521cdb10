"""Writing of a run's report into its directory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from steadfast.config import RunConfig
from steadfast.errors import UsageError
from steadfast.run.directory import REPORT, RunDirectory

_MOST_STEPS = 500_000  # for more steps the report is not written automatically: it would delay the exit by seconds


def write_report(directory: RunDirectory) -> str:
    """Write the report, and return its path or URI.

    Raises:
        UsageError: the run has not begun.
    """
    # Bokeh takes long to import, and a run needs it only at its end.
    from steadfast.analysis.report.course import Course
    from steadfast.analysis.report.page import page_of

    course = Course.read(directory)
    if not course.ledger.accounts:
        raise UsageError(f"{directory.uri} has no events, so there is nothing to report: the run has not begun")
    directory.store.commit(REPORT, page_of(course).encode())
    return directory / REPORT


@contextmanager
def reported(config: RunConfig, directory: RunDirectory, say: Callable[[str], object]) -> Iterator[None]:
    """Write the report when the context ends, if `run.report` is set.

    An error in the report is shown as a warning.
    """
    try:
        yield
    finally:
        # A user who presses Ctrl-C a second time should not have to wait for the report.
        if config.report and not isinstance(sys.exception(), KeyboardInterrupt):
            try:
                _report(directory, say)
            except Exception as error:
                say(f"warning: no {REPORT}: {type(error).__name__}: {error}")


def _report(directory: RunDirectory, say: Callable[[str], object]) -> None:
    # The last line shows the length of the ledger without reading all of it.
    num_steps = directory.last_step()
    if num_steps > _MOST_STEPS:
        say(f"no {REPORT} is written automatically for {num_steps} steps; steadfast report {directory.uri} writes it")
    elif num_steps:
        say(f"report      {write_report(directory)}")
