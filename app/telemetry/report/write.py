"""Write the report of a run into its directory."""

import logging

from app.errors import UsageError
from app.run.directory import STEPS, RunDirectory
from app.storage import LocalStore
from app.telemetry.report.course import Course
from app.telemetry.report.page import REPORT, page_of

_log = logging.getLogger(__name__)
_MOST_LEDGER_BYTES = 2**27  # that the end of a run reads: more would delay its exit by seconds


def write_report(directory: RunDirectory) -> str:
    """Write the page. Return where it is. Raises UsageError if the run has not begun."""
    course = Course.read(directory)
    if not course.ledger.accounts:
        raise UsageError(f"{directory.uri} has no events: there is nothing to report before the run has begun")
    directory.store.commit(REPORT, page_of(course).encode())
    return directory / REPORT
