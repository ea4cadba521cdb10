"""Pages of docs/ that are made from the code: `make docs` writes them, and a unit test compares them."""

from collections.abc import Callable
from pathlib import Path

from tests.documents.command_line import command_line_page
from tests.documents.events import events_page
from tests.documents.programs import programs_page
from tests.documents.reference import reference_page

DOCS = Path(__file__).parents[2] / "docs"

PAGES: dict[str, Callable[[], str]] = {
    "command_line.md": command_line_page,
    "events.md": events_page,
    "reference.md": reference_page,
    "programs.md": programs_page,
}
