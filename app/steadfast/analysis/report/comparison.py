"""Build the HTML page that compares several runs."""

from collections.abc import Mapping, Sequence
from html import escape

from steadfast.analysis.report import figures, html
from steadfast.analysis.report.course import Course

_LOSSES = "The loss of every step of each run. Dots: the validation loss."


def comparison_of(courses: Mapping[str, Course], table: Mapping[str, Sequence[str]]) -> str:
    """Return the HTML of a comparison.

    Args:
        courses: the data of each run by its name.
        table: cells of all runs, in the order of `courses`, by the heading of their row.
    """
    title = ", ".join(courses)
    drawing = figures.losses_of(courses)
    drawings = {}
    chart = "<p>No run has finished a step yet.</p>"
    if drawing.legend:
        drawings["losses"] = drawing
        chart = html.plot("losses", drawing, controls=True)
    # The titles of columns are names of runs, which are texts of the run.
    heads = [("", "key"), *((escape(name), "") for name in courses)]
    rows = [[escape(heading), *map(escape, cells)] for heading, cells in table.items()]
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        html.section("Loss", _LOSSES, chart, kind="wide"),
        html.section("Differences, results and cost", "", html.table(heads, rows), kind="wide"),
    ]
    return html.document(title, body, drawings)
