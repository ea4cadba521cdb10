"""Build HTML pages with Bokeh's plots.

A page loads no other file. Callers escape the texts of a run.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

from steadfast.analysis.report.figures import Drawing

# The script of `report/page.html` finds these controls by their ids.
_CONTROLS = (
    '<div class="controls"><label>smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" '
    'value="0.6"></label><label><input type="checkbox" id="log"> logarithmic axis</label></div>'
)


def document(title: str, body: Iterable[str], drawings: Mapping[str, Drawing]) -> str:
    """Return a whole page.

    Args:
        title: text of the browser's tab.
        body: HTML of the sections.
        drawings: the plots, by the id of the element that `plot` has made for each of them.
    """
    from bokeh.embed import json_item
    from bokeh.resources import Resources

    # The page embeds Bokeh's code, because a reader of the page may have no access to the network.
    (bokeh,) = Resources("inline", components=["bokeh"]).js_raw[:1]
    # A template with `$name` fits, because the braces of CSS and JavaScript would need escapes in a format string.
    sources = files("steadfast.analysis")
    template = Template(sources.joinpath("report/page.html").read_text("utf-8"))
    items = [json_item(drawing.plot, name) for name, drawing in drawings.items()]
    return template.substitute(
        title=escape(title),
        style=sources.joinpath("page.css").read_text("utf-8"),
        bokeh=bokeh,
        body="\n".join(body),
        # A text of the run could contain "</script>" and close the element.
        plots=json.dumps(items).replace("<", "\\u003c"),
    )


def group(title: str) -> str:
    """Return the heading of several sections."""
    return f'<h2 class="wide">{title}</h2>'


def section(title: str, explained: str, content: str, kind: str = "") -> str:
    """Return a section with its heading. A section of the kind "wide" takes the whole width."""
    told = f"<p>{explained}</p>" if explained else ""
    return f'<section class="{kind}"><h3>{title}</h3>{told}{content}</section>'


def plot(name: str, drawing: Drawing, controls: bool = False) -> str:
    """Return the element of a plot with its legend, and with controls for smoothing and scale."""
    shown = _legend(drawing.legend)
    if controls:
        shown += _CONTROLS
    return f'{shown}<div id="{name}"></div>'


def key(color: str) -> str:
    """Return a small square of a colour, for legends and tables."""
    return f'<i class="key" style="background:{color}"></i>'


def table(heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], kind: str = "cards") -> str:
    """Return a table.

    Args:
        heads: title and kind of each column; the kind is the CSS class of its cells.
        rows: the cells of each row, as HTML.
        kind: form on a narrow screen. "cards" gives each row a block in which each cell shows the title of its column.
            "lines" gives each row a line, with the cell of the kind "meaning" below.
    """
    head = "".join(f'<th class="{column}">{title}</th>' for title, column in heads)
    body = ""
    for row in rows:
        columns = zip(heads, row, strict=True)
        cells = [f'<td class="{column}" data-head="{title}">{cell}</td>' for (title, column), cell in columns]
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def preformatted(text: str) -> str:
    """Return an escaped text that keeps its lines."""
    return f"<pre>{escape(text)}</pre>"


def _legend(colors: Mapping[str, str]) -> str:
    if not colors:
        return ""
    # A label may be the name of a node, which is a text of the run.
    keys = [f"<span>{key(color)}{escape(label)}</span>" for label, color in colors.items()]
    return f'<div class="legend">{"".join(keys)}</div>'
