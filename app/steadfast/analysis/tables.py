"""Show texts and tables of runs in the terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from steadfast.units import printable


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> Table:
    """Return a table with rows below their headings.

    Args:
        headings: heading of each column.
        rows: cells of each row.
        numbers: headings of the columns that are aligned to the right, and are never broken.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        if heading in numbers:
            table.add_column(text_of(heading), justify="right", no_wrap=True)
        else:
            # Names may be longer than the terminal is wide.
            table.add_column(text_of(heading), overflow="fold")
    for row in rows:
        table.add_row(*map(text_of, row))
    return table


def text_of(content: str) -> Text:
    """Return a text of a run with markup and control characters disabled."""
    return Text(printable(content))


def print_page(page: object) -> None:
    """Print a table or another renderable of Rich."""
    # Rich would otherwise colour every number and path.
    Console(highlight=False).print(page)
