"""Draw the plots of the report with Bokeh.

The page sets the colours of text and grid.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    HoverTool,
    LinearScale,
    LogTicker,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    Span,
)
from bokeh.plotting import figure

from steadfast.analysis.report.course import METRIC, Course, Curve, Trace
from steadfast.run.events import AttemptStarted
from steadfast.telemetry.goodput import Account, summed
from steadfast.telemetry.interruptions import Interruption
from steadfast.units import node_name

# These colours are distinct on white and on black pages, and for readers with colour blindness (Okabe and Ito, 2008).
_BLUE, _ORANGE, _GREEN, _RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
_PURPLE, _SKY, _YELLOW = "#cc79a7", "#56b4e9", "#c8b900"
_NODES = (_BLUE, _ORANGE, _GREEN, _PURPLE, _SKY, _YELLOW, _RED, "#8c6d31", "#7f7f7f", "#6b6ecf")
# By category of `telemetry.goodput`.
COLORS = {
    "productive": _GREEN,
    "data wait": _YELLOW,
    "validation": _PURPLE,
    "snapshot": "#e7b8d1",
    "checkpoint wait": "#a05195",
    "start-up": _SKY,
    "detection": _RED,
    "re-forming": _ORANGE,
    "restore": "#8c6d31",
    "redone": "#a23b00",
    "waiting for workers": _BLUE,
    "idle": "#8f959e",
}
_MOST_BARS = 40
_MARKS = {"failure": _RED, "resize": _SKY, "restart": _PURPLE}
_FOOT = 0.02  # height of the marks above the axis, as a share of the plot


class Drawing(NamedTuple):
    """Plot with its legend.

    The page shows the legend, because a legend inside of the plot does not fit on a narrow screen.
    """

    plot: Any
    legend: dict[str, str]  # colour by label


def losses(course: Course) -> Drawing:
    """Draw the loss of every step, validation loss and interruptions, on a linear and on a logarithmic axis."""
    training = _trace(course.losses())
    validation = _points(course.validations, "loss")
    plots = _both_scales()
    legend: dict[str, str] = {}
    for plot in plots.children:
        legend |= _smoothed(plot, training, _BLUE, "training")
        legend |= _line(plot, validation, _ORANGE, "validation", marked=True)
        legend |= _mark(plot, course)
    return Drawing(plots, legend)


def losses_of(courses: Mapping[str, Course]) -> Drawing:
    """Draw the losses of several runs by name, with validation losses as dots."""
    plots = _both_scales()
    legend: dict[str, str] = {}
    for index, (name, course) in enumerate(courses.items()):
        color = _NODES[index % len(_NODES)]
        training = _trace(course.losses())
        validation = _points(course.validations, "loss")
        for plot in plots.children:
            legend |= _smoothed(plot, training, color, name)
            _line(plot, validation, color, f"{name}, validation", marked=True)
    return Drawing(plots, legend)


def metric(course: Course, name: str) -> Drawing:
    """Draw a metric of training and of validation by step."""
    plot = _plot("step", name)
    legend = _line(plot, _points(course.figures, METRIC + name), _BLUE, "training")
    legend |= _line(plot, _points(course.validations, name), _ORANGE, "validation", marked=True)
    return Drawing(plot, legend | _mark(plot, course))


def figure_of(course: Course, name: str, label: str) -> Drawing:
    """Draw one figure of the log steps."""
    plot = _plot("step", label)
    # By default small numbers, such as learning rates, would be labelled like 3.000e-3.
    plot.yaxis.formatter = PrintfTickFormatter(format="%.4g")
    legend = _line(plot, _points(course.figures, name), _BLUE, label)
    return Drawing(plot, legend | _mark(plot, course))


def step_times(course: Course) -> Drawing:
    """Draw the median step time and the time waiting for data by step."""
    plot = _plot("step", "ms a step")
    legend = _line(plot, _points(course.figures, "step_ms"), _BLUE, "step")
    # A line of metrics has the wait as a share of the step's time.
    waits_ms = [row.get("data_wait", 0.0) * row.get("step_ms", 0.0) for row in course.figures.rows]
    waits = ColumnDataSource({"step": course.figures.steps, "value": waits_ms})
    legend |= _line(plot, waits, COLORS["data wait"], "data wait")
    plot.y_range.start = 0
    return Drawing(plot, legend | _mark(plot, course))


def worlds(course: Course) -> Drawing:
    """Draw the number of workers on each node, from the first step on."""
    accounts = [account for account in course.ledger.accounts if account.attempt]
    # The start of the command takes a minute on a loaded machine, and would dwarf a short run.
    began_s = min((account.steps_from_s for account in accounts), default=0.0)
    ended_s = max((account.ended_s for account in accounts), default=0.0)
    unit_s, unit = time_unit(ended_s - began_s)
    started = course.starts()
    colors: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for account in accounts:
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
    plot = _plot(f"{unit} since the first step began", "workers")
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
    used = {row["category"] for row in rows}
    return Drawing(plot, {category: color for category, color in COLORS.items() if category in used})


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the length in seconds and the name of a time unit for an axis of this length."""
    for unit_s, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds > 2 * unit_s:
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


def _both_scales() -> Any:
    """Return two plots of losses, of which the page shows one: its axis is linear or logarithmic."""
    linear = _plot("step", "loss", name="linear")
    logarithmic = _plot("step", "loss", name="log", y_axis_type="log", x_range=linear.x_range)
    # A loss often stays within a factor of ten, where powers of ten alone would give an axis of one label.
    logarithmic.yaxis.ticker = LogTicker(mantissas=[1, 2, 5])
    logarithmic.yaxis.formatter = PrintfTickFormatter(format="%.4g")
    return column(linear, logarithmic, sizing_mode="stretch_width")


def _source(rows: Sequence[dict[str, Any]], *drawn: str) -> ColumnDataSource:
    """Return the columns of `rows`, or empty columns named `drawn` without rows."""
    # Bokeh reports a missing column of a plot as an error.
    names = tuple(rows[0]) if rows else drawn
    return ColumnDataSource({name: [row[name] for row in rows] for name in names})


def _points(curve: Curve, name: str) -> ColumnDataSource:
    return ColumnDataSource({"step": curve.steps, "value": curve.column(name)})


def _trace(trace: Trace) -> ColumnDataSource:
    # The script of the page computes the column `smooth`, and finds the source by its name.
    columns = {"step": trace.steps, "value": trace.values, "mean": trace.means, "smooth": trace.means}
    return ColumnDataSource(columns, name="smoothed")


def _smoothed(plot: Any, source: ColumnDataSource, color: str, label: str) -> dict[str, str]:
    """Draw a trace, with its smoothed line above. Return the legend, which is empty without points."""
    if not source.data["step"]:
        return {}
    plot.line("step", "value", color=color, line_width=1, line_alpha=0.35, source=source)
    drawn = plot.line("step", "smooth", color=color, line_width=2, source=source)
    tooltips = [("step", "@step"), (label, "@value{%.4g}"), ("smoothed", "@smooth{%.4g}")]
    _hover(plot, [drawn], tooltips, mode="vline")
    return {label: color}


def _line(plot: Any, source: ColumnDataSource, color: str, label: str, marked: bool = False) -> dict[str, str]:
    """Draw the columns `step` and `value`. Return the legend, which is empty without values."""
    if not any(map(math.isfinite, source.data["value"])):
        return {}
    drawn = plot.line("step", "value", color=color, line_width=2, source=source)
    if marked:
        # Validations are far apart. A line alone would not show where they are, nor a single one at all. Only one of
        # both drawings has tooltips. Otherwise each point would show two.
        drawn = plot.scatter("step", "value", color=color, size=7, source=source)
    # A line is too thin to hit with the pointer, so the pointer's step alone counts.
    _hover(plot, [drawn], [("step", "@step"), (label, "@value{%.4g}")], mode="vline")
    return {label: color}


def _hover(plot: Any, drawn: list[Any], tooltips: list[tuple[str, str]], mode: str = "mouse") -> None:
    # The numeral format, which is the default, shows a learning rate of 1e-5 as 0.
    formatters = {"@value": "printf", "@smooth": "printf"}
    plot.add_tools(HoverTool(renderers=drawn, tooltips=tooltips, formatters=formatters, mode=mode, visible=False))


def _mark(plot: Any, course: Course) -> dict[str, str]:
    """Mark each interruption by a line, with details at its foot. Return the legend."""
    rows: list[dict[str, Any]] = []
    kinds = set()
    for each in course.interruptions:
        if each.step is None:  # no other attempt has finished a step yet
            continue
        color = color_of(each)
        mark = Span(location=each.step, dimension="height", line_color=color, line_dash="dotted", line_width=2)
        plot.add_layout(mark)
        # The message of an exception may have pages.
        told = {"step": each.step, "y": _FOOT, "color": color, "kind": each.kind, "cause": each.cause[:200]}
        kinds.add(each.kind)
        rows.append({**told, "source": each.source, "lost_steps": each.lost_steps, "lost_s": each.lost_s})
    if rows:
        # A range of their own puts the marks on the axis, whatever the values and the scale of the plot are.
        if plot.renderers:
            plot.y_range.renderers = list(plot.renderers)
        plot.extra_y_ranges = {"marks": Range1d(0, 1)}
        plot.extra_y_scales = {"marks": LinearScale()}
        sign = {"size": 11, "marker": "inverted_triangle", "color": "color", "y_range_name": "marks"}
        signs = plot.scatter("step", "y", source=_source(rows), **sign)
        tooltips = [("", "@kind at step @step"), ("why", "@cause"), ("restored from", "@source")]
        _hover(plot, [signs], [*tooltips, ("steps lost", "@lost_steps"), ("seconds lost", "@lost_s{0.0}")])
    return {kind: color for kind, color in _MARKS.items() if kind in kinds}


def _nodes(start: AttemptStarted | None, account: Account) -> dict[str, int]:
    if start is not None and start.nodes:
        return {node: len(ranks) for node, ranks in start.nodes.items()}
    # Only a run with copies in the memory of nodes records which node has which ranks.
    return {"workers": account.world_size}


def _grouped(accounts: Sequence[Account]) -> list[Sequence[Account]]:
    num_bars = min(_MOST_BARS, len(accounts))
    bounds = [len(accounts) * bar // num_bars for bar in range(num_bars + 1)]
    return [accounts[start:stop] for start, stop in pairwise(bounds)]


def _bar(place: int, accounts: Sequence[Account]) -> list[dict[str, Any]]:
    """Return the segments of one bar, from bottom to top."""
    rank_s = summed(accounts)
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
