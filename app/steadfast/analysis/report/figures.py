"""Draw the plots of the report with Bokeh.

`page.html` sets the colours of text and grid.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Span
from bokeh.plotting import figure

from steadfast.analysis.report.course import Course
from steadfast.run.events import AttemptStarted
from steadfast.telemetry.goodput import CATEGORIES, Account
from steadfast.telemetry.interruptions import Interruption
from steadfast.units import node_name

# These colours are distinct on white and on black pages, and for readers with colour blindness (Okabe and Ito, 2008).
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY, _YELLOW = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#c8b900",
)
_NODES = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _YELLOW, _RED, "#8c6d31", "#7f7f7f", "#6b6ecf")
COLORS = dict(
    zip(
        CATEGORIES,
        (
            _GREEN,
            _YELLOW,
            _PURPLE,
            "#e7b8d1",
            "#a05195",
            _SKY,
            _RED,
            _ORANGE,
            "#8c6d31",
            "#a23b00",
            _BLUE,
            "#8f959e",
        ),
        strict=True,
    )
)
_MOST_BARS = 40
_MARKS = {"failure": _RED, "resize": _SKY, "restart": _PURPLE}


class Drawing(NamedTuple):
    """Plot with its legend.

    The page shows the legend, because a legend inside of the plot does not fit on a narrow screen.
    """

    plot: Any
    legend: dict[str, str]  # colour by label


def losses(course: Course) -> Drawing:
    """Draw loss, validation loss and interruptions by step."""
    plot = _plot("step", "loss")
    _line(plot, _points(course.figures.steps, course.figures.column("loss")), _BLUE, "training")
    held_out = course.validations
    # Validations are far apart. A line alone would not show where they are, nor a single one at all.
    _line(plot, _points(held_out.steps, held_out.column("loss")), _ORANGE, "validation", marked=True)
    marks = _mark(plot, course, course.figures.column("loss"))
    return Drawing(plot, {"training": _BLUE, "validation": _ORANGE, **marks})


def step_times(course: Course) -> Drawing:
    """Draw the median step time and the time waiting for data by step."""
    plot = _plot("step", "ms a step")
    _line(plot, _points(course.figures.steps, course.figures.column("step_ms")), _BLUE, "step")
    waits_ms = []
    for row in course.figures.rows:
        # A line of metrics has the wait as a share of the step's time.
        waits_ms.append(row.get("data_wait", 0.0) * row.get("step_ms", 0.0))
    _line(plot, _points(course.figures.steps, waits_ms), COLORS["data wait"], "data wait")
    marks = _mark(plot, course, course.figures.column("step_ms"))
    plot.y_range.start = 0
    return Drawing(plot, {"step": _BLUE, "data wait": COLORS["data wait"], **marks})


def worlds(course: Course) -> Drawing:
    """Draw the number of workers on each node over time."""
    unit_s, unit = time_unit(course)
    began_s = course.ledger.accounts[0].began_s
    started = course.starts()
    colors: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for account in course.ledger.accounts:
        start = started.get(account.attempt)
        bottom = 0
        for node, count in _nodes(start, account).items():
            # A node keeps its colour in all attempts, so that its absence is visible.
            color = colors.setdefault(node, _NODES[len(colors) % len(_NODES)])
            rows.append(
                {
                    "left": (account.steps_from_s - began_s) / unit_s,
                    "right": (account.ended_s - began_s) / unit_s,
                    "bottom": bottom,
                    "top": bottom + count,
                    "color": color,
                    "node": node_name(node),
                    "attempt": account.attempt,
                }
            )
            bottom += count
    plot = _plot(unit, "workers")
    sides = ("left", "right", "top", "bottom")
    source = _source(rows, *sides, "color")
    quads = plot.quad(*sides, fill_color="color", line_color=None, fill_alpha=0.9, source=source)
    _hover(plot, [quads], [("attempt", "@attempt"), ("node", "@node"), ("up to rank", "@top")])
    plot.x_range.start = 0
    plot.y_range.start = 0
    plot.yaxis.ticker.desired_num_ticks = 4
    # Workers are counted in whole numbers, so there are no ticks in between.
    plot.yaxis.ticker.num_minor_ticks = 0
    plot.yaxis.ticker.min_interval = 1
    return Drawing(plot, {node_name(node): color for node, color in colors.items()})


def time_of_ranks(course: Course) -> Drawing:
    """Draw the use of all ranks' time, one bar for each attempt.

    In a run of many attempts one bar stands for several consecutive attempts.
    """
    groups = _grouped(course.ledger.accounts)
    rows: list[dict[str, Any]] = []
    labels = {}
    for place, accounts in enumerate(groups):
        rows += _bar(place, accounts)
        labels[place] = _label(accounts)
    plot = _plot("attempt", "seconds of all ranks", x_range=(-0.5, len(groups) - 0.5))
    # Bars are placed by index, because labels may repeat: each command without a step is labelled as attempt 0.
    plot.xaxis.ticker = list(range(len(groups)))
    plot.xaxis.major_label_overrides = labels
    source = _source(rows, "place", "bottom", "top", "color")
    bars = plot.vbar(x="place", width=0.8, bottom="bottom", top="top", color="color", line_color=None, source=source)
    tooltips = [("", "@category"), ("seconds of ranks", "@rank_s{0.0}"), ("of the attempt", "@share{0.0 %}")]
    _hover(plot, [bars], tooltips)
    # Bokeh would leave a gap below the bars.
    plot.y_range.start = 0
    # More labels side by side would overlap.
    plot.xaxis.major_label_orientation = "horizontal" if len(groups) <= 12 else "vertical"
    plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]a")
    return Drawing(plot, {})


def time_unit(course: Course) -> tuple[float, str]:
    """Return the seconds and name of a time unit for the run's length."""
    wall_s = course.ledger.accounts[-1].ended_s - course.ledger.accounts[0].began_s
    for unit_s, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if wall_s > 2 * unit_s:
            return unit_s, unit
    return 1.0, "seconds"


def color_of(interruption: Interruption) -> str:
    """Return the colour of an interruption's mark."""
    return _MARKS[interruption.kind]


def _plot(x: str, y: str, **options: Any) -> Any:
    plot = figure(
        height=300,
        sizing_mode="stretch_width",
        x_axis_label=x,
        y_axis_label=y,
        tools="box_zoom,reset",
        active_drag=None,  # without this a drag on a touch screen would zoom instead of scrolling the page
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_color=None,
        **options,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.xgrid.visible = False
    plot.min_border_left = 50
    return plot


def _source(rows: Sequence[dict[str, Any]], *drawn: str) -> ColumnDataSource:
    """Return the columns of `rows`, or empty columns named `drawn` without rows."""
    # Bokeh reports a missing column of a plot as an error.
    names = tuple(rows[0]) if rows else drawn
    columns = {}
    for name in names:
        columns[name] = [row[name] for row in rows]
    return ColumnDataSource(columns)


def _points(steps: Sequence[int], values: Sequence[float]) -> ColumnDataSource:
    return ColumnDataSource({"step": steps, "value": values})


def _line(plot: Any, source: ColumnDataSource, color: str, label: str, marked: bool = False) -> None:
    """Draw the columns `step` and `value`."""
    drawn = plot.line("step", "value", color=color, line_width=2, source=source)
    if marked:
        # Only one of both drawings has tooltips. Otherwise each point would show two.
        drawn = plot.scatter("step", "value", color=color, size=7, source=source)
    # A line is too thin to hit with the pointer, so the pointer's step alone counts.
    _hover(plot, [drawn], [("step", "@step"), (label, "@value{0.0000}")], mode="vline")


def _hover(plot: Any, drawn: list[Any], tooltips: list[tuple[str, str]], mode: str = "mouse") -> None:
    plot.add_tools(HoverTool(renderers=drawn, tooltips=tooltips, mode=mode, visible=False))


def _mark(plot: Any, course: Course, values: Iterable[float]) -> dict[str, str]:
    """Mark each interruption by a line, with details at its foot. Return the legend."""
    rows: list[dict[str, Any]] = []
    kinds = set()
    # A loss may be NaN or infinite, and a mark at such a height would not be drawn.
    lowest = min(filter(math.isfinite, values), default=0.0)
    for each in course.interruptions:
        if each.step is None:  # no other attempt has finished a step yet
            continue
        color = color_of(each)
        mark = Span(location=each.step, dimension="height", line_color=color, line_dash="dotted", line_width=2)
        plot.add_layout(mark)
        # The message of an exception may have pages.
        told = {"step": each.step, "y": lowest, "color": color, "kind": each.kind, "cause": each.cause[:200]}
        kinds.add(each.kind)
        rows.append({**told, "source": each.source, "lost_steps": each.lost_steps, "lost_s": each.lost_s})
    if rows:
        signs = plot.scatter("step", "y", size=11, marker="inverted_triangle", color="color", source=_source(rows))
        tooltips = [("", "@kind at step @step"), ("why", "@cause"), ("restored from", "@source")]
        _hover(plot, [signs], [*tooltips, ("steps lost", "@lost_steps"), ("seconds lost", "@lost_s{0.0}")])
    legend: dict[str, str] = {}
    for kind, color in _MARKS.items():
        if kind in kinds:
            legend[kind] = color
    return legend


def _nodes(start: AttemptStarted | None, account: Account) -> dict[str, int]:
    if start is not None and start.nodes:
        return {node: len(ranks) for node, ranks in start.nodes.items()}
    # Only a run with copies in the memory of nodes records which node has which ranks.
    return {"workers": account.world_size}


def _grouped(accounts: Sequence[Account]) -> list[Sequence[Account]]:
    num_bars = min(_MOST_BARS, len(accounts))
    groups = []
    start = 0
    for bar in range(1, num_bars + 1):
        stop = len(accounts) * bar // num_bars
        groups.append(accounts[start:stop])
        start = stop
    return groups


def _bar(place: int, accounts: Sequence[Account]) -> list[dict[str, Any]]:
    """Return the segments of one bar, from bottom to top."""
    rank_s = dict.fromkeys(CATEGORIES, 0.0)
    for account in accounts:
        for category, seconds in account.rank_s.items():
            rank_s[category] += seconds
    total_s = sum(rank_s.values()) or 1.0
    rows: list[dict[str, Any]] = []
    top = 0.0
    for category, seconds in rank_s.items():
        if seconds > 0:
            sizes = {"bottom": top, "top": top + seconds, "rank_s": seconds, "share": seconds / total_s}
            rows.append({"place": place, "category": category, "color": COLORS[category], **sizes})
            top += seconds
    return rows


def _label(accounts: Sequence[Account]) -> str:
    first, last = accounts[0].attempt, accounts[-1].attempt
    return str(first) if first == last else f"{first}-{last}"
