"""Build the HTML page of a run's report.

Every text of the run is escaped.
"""

import json
import time
from collections.abc import Iterator, Mapping
from html import escape

from steadfast.analysis.report import figures, html
from steadfast.analysis.report.course import Course
from steadfast.config import dump_config
from steadfast.errors import SteadfastError
from steadfast.run import events
from steadfast.storage.documents import read_json
from steadfast.telemetry.goodput import CATEGORIES, goodput
from steadfast.telemetry.interruptions import Interruption
from steadfast.units import compact, duration, node_name, number, plural

_MOST_ROWS = 200
_MOST_METRICS = 24
_MOST_RANKS = 32
_MOST_TILES = 4  # figures of the newest validation among the tiles
_SHORT_S = 300.0  # In a shorter run start-up takes a share of the time that says nothing about longer runs.
_NO_TIME_S = 0.05  # less would be shown as 0.0 s
_LOSSES = (
    "The loss of every step. Dotted lines: the step from which the run continued after a failure, a resize or another "
    "command."
)
_RANKS_EXPLAINED = (
    "Time that each rank spends by itself in a step, and how often the other ranks waited longest for it. Only runs on "
    "Ray measure this, by heartbeats. Below: ranks that cost the other ranks a tenth of every step or more."
)


def page_of(course: Course) -> str:
    """Return the HTML of the report."""
    metrics = course.metrics()[:_MOST_METRICS]
    # A plot's name is the id of its element, so texts of the run are no part of it.
    drawings = {"losses": figures.losses(course)}
    for index, name in enumerate(metrics):
        drawings[f"metric-{index}"] = figures.metric(course, name)
    drawings |= {
        "rate": figures.figure_of(course, "lr", "learning rate"),
        "norm": figures.figure_of(course, "grad_norm", "gradient norm"),
        "worlds": figures.worlds(course),
        "steps": figures.step_times(course),
        "time": figures.time_of_ranks(course),
    }
    drawn, plots = {}, {}
    for name, drawing in drawings.items():
        # A run that ended early has no points for some plots, and a plot without points has no legend.
        plots[name] = "<p>No figures yet.</p>"
        if drawing.legend:
            drawn[name] = drawing
            plots[name] = html.plot(name, drawing, controls=name == "losses")
    return html.document(course.directory.name, _sections(course, metrics, plots), drawn)


def _sections(course: Course, metrics: list[str], plots: Mapping[str, str]) -> Iterator[str]:
    """Yield the parts of the page.

    Args:
        course: the data of the run.
        metrics: names of the metrics that have a plot.
        plots: HTML of each plot with its legend, by the name of the plot.
    """
    yield _header(course)
    yield html.group("Training")
    yield html.section("Loss", _LOSSES, plots["losses"], kind="wide")
    for index, name in enumerate(metrics):
        yield html.section(escape(name), "", plots[f"metric-{index}"])
    yield html.section("Learning rate", "", plots["rate"])
    yield html.section("Gradient norm", "Before clipping, at log steps.", plots["norm"])
    yield html.group("Failures and time")
    yield html.section("Cost of each interruption", "", _interruptions(course), kind="wide")
    yield html.section("Use of time", _explained(course), _shares(course) + plots["time"], kind="wide")
    yield html.section("Workers", "Number of workers on each node.", plots["worlds"])
    yield html.section("Step time", "Median time of the steps between two log lines.", plots["steps"])
    yield html.section("Slow ranks", _RANKS_EXPLAINED, _rank_times(course) + _stragglers(course), kind="wide")
    yield html.group("Setup")
    yield html.section("Configuration", "", html.preformatted(_config(course)))
    environment = read_json(course.directory.store, "environment.json") or {}
    yield html.section("Environment", "", html.preformatted(json.dumps(environment, indent=2)))


def _header(course: Course) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(course.ledger.accounts[0].began_s))
    shown = ""
    for name, value in _tiles(course).items():
        # The name may be that of a metric, which is a text of the run.
        shown += f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>"
    status = (course.directory.summary() or {}).get("status", "not finished")
    told = f"{status} · began {began} · {course.directory.uri}"
    name = escape(course.directory.name)
    tiles = f'<div class="tiles">{shown}</div>'
    return f"<header><h1>{name}</h1><p>{escape(told)}</p>{tiles}<p>{_cost(course)}</p></header>"


def _tiles(course: Course) -> dict[str, str]:
    """Return the results of training, by name."""
    tiles = {}
    # Without a summary the run has not finished, and the newest log line is closest to its last step.
    last_step = course.figures.steps[-1] if course.figures.steps else 0
    tiles["steps"] = str((course.directory.summary() or {}).get("step", last_step))
    if course.figures.steps:
        tiles["training loss"] = number(course.figures.column("loss")[-1])
    if course.validations.rows:
        for name, value in list(course.validations.rows[-1].items())[:_MOST_TILES]:
            tiles[f"validation {name}"] = number(value)
    tiles["samples"] = compact(course.totals.samples)
    tiles["wall time"] = duration(goodput(course.totals)["wall_s"])
    return tiles


def _cost(course: Course) -> str:
    """Return a line with the cost of failures and starts."""
    worth = goodput(course.totals)
    start_up_s = sum(account.seconds.get("start-up", 0.0) for account in course.ledger.accounts)
    parts = [f"goodput {worth['goodput']:.1%}"]
    if worth["wall_s"] < _SHORT_S:
        parts = [f"start-up {start_up_s:.0f} s", f"training {course.totals.productive_s:.0f} s"]
    for kind in ("failure", "resize", "restart"):
        count = sum(each.kind == kind for each in course.interruptions)
        if count:
            parts.append(plural(count, kind))
    if course.interruptions:
        parts.append(f"{plural(course.totals.num_lost, 'step')} done again")
    else:
        parts.append("not interrupted")
    return " · ".join(parts)


def _explained(course: Course) -> str:
    total_s = sum(course.ledger.rank_s().values())
    return f"{number(total_s)} seconds of all ranks, without the time between two commands."


def _shares(course: Course) -> str:
    """Return a bar and a table of the run's use of time."""
    rank_s = course.ledger.rank_s()
    # Without any time the shares are 0, instead of a division by 0.
    total_s = sum(rank_s.values()) or 1.0
    parts, rows, absent = "", [], []
    for category, seconds in rank_s.items():
        if seconds < _NO_TIME_S:
            absent.append(category)
            continue
        color = figures.COLORS[category]
        # The browser computes the widths of the segments from the seconds.
        parts += f'<span style="background:{color};flex:{seconds:.3f}" title="{category}"></span>'
        share = f"{seconds / total_s:.1%}"
        rows.append([html.key(color) + category, f"{seconds:,.1f} s", share, CATEGORIES[category]])
    heads = [("", "key"), ("time of ranks", "number"), ("share", "number"), ("", "meaning")]
    shown = f'<div class="bar">{parts}</div>{html.table(heads, rows, kind="lines")}'
    if absent:
        shown += f"<p>No time: {', '.join(absent)}.</p>"
    return shown


def _interruptions(course: Course) -> str:
    rows = list(map(_interruption, course.interruptions[:_MOST_ROWS]))
    if not rows:
        return "<p>The run was not interrupted.</p>"
    heads = [("", "key"), ("at step", "number"), ("workers", "number"), ("why", "text"), ("restored from", "")]
    heads += [("detected in", "number"), ("back in", "number"), ("steps lost", "number"), ("time lost", "number")]
    return html.table(heads, rows)


def _interruption(each: Interruption) -> list[str]:
    """Return the cells of an interruption's row."""
    step = workers = detected = back = lost_steps = ""
    if each.step is not None:
        step = str(each.step)
    if each.workers:
        workers = "{} → {}".format(*each.workers)
    if each.detected_s is not None:
        detected = f"{each.detected_s:.1f} s"
    if each.back_s is not None:
        back = f"{each.back_s:.1f} s"
    # The costs are known only when the next attempt has finished a step.
    lost = "not back yet"
    if each.attempt:
        lost_steps, lost = str(each.lost_steps), f"{each.lost_s:.1f} s"
    # The message of an exception may have pages.
    cause, source = escape(each.cause[:300]), escape(each.source)
    kind = html.key(figures.color_of(each)) + each.kind
    return [kind, step, workers, cause, source, detected, back, lost_steps, lost]


def _rank_times(course: Course) -> str:
    """Return a table of the ranks that other ranks waited for most often."""
    ranks = course.ranks()
    if not ranks:
        return ""
    rows = []
    for rank in sorted(ranks, key=lambda each: -each.last)[:_MOST_RANKS]:
        row = [str(rank.attempt), str(rank.rank), f"{rank.own_ms:.3g} ms", f"{rank.of_median:.2f}", f"{rank.last:.0%}"]
        rows.append([*row, escape(node_name(rank.node)), escape(rank.gpu)])
    heads = [("attempt", "number"), ("rank", "number"), ("by itself", "number"), ("of the median", "number")]
    shown = html.table([*heads, ("last in", "number"), ("node", ""), ("GPU", "")], rows)
    if len(ranks) > _MOST_RANKS:
        shown += f"<p>And {len(ranks) - _MOST_RANKS} more ranks.</p>"
    return shown


def _stragglers(course: Course) -> str:
    # A rank is reported again and again while it stays slow, so equal reports become one row.
    found: dict[tuple[int, str, str], list[float]] = {}
    for event in course.told.get(events.Straggler, []):
        found.setdefault((event.rank, event.member, event.phase), []).append(event.share)
    if not found:
        return "<p>No rank cost the other ranks that much.</p>"
    rows = []
    slowest = sorted(found.items(), key=lambda each: -max(each[1]))
    for (rank, member, phase), shares in slowest[:_MOST_ROWS]:
        row = [str(rank), escape(member), escape(phase), f"{max(shares):.0%}", plural(len(shares), "time")]
        rows.append(row)
    heads = [("rank", "number"), ("worker", ""), ("slow in", ""), ("of a step, at most", "number"), ("told", "number")]
    return html.table(heads, rows)


def _config(course: Course) -> str:
    # The page shows the parsed configuration, not the bytes of the file, which may have any content.
    try:
        config = course.directory.stored_config()
    except SteadfastError as error:
        return str(error)
    return dump_config(config) if config else ""
