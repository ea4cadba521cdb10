"""Build the HTML page of the report.

The page loads no other file, and every text of the run is escaped.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

from steadfast.analysis.report import figures
from steadfast.analysis.report.course import Course
from steadfast.config import dump_config
from steadfast.errors import SteadfastError
from steadfast.run import events
from steadfast.storage.documents import read_json
from steadfast.telemetry.goodput import CATEGORIES, goodput
from steadfast.telemetry.interruptions import Interruption
from steadfast.units import compact, duration, node_name, number, plural

_MOST_ROWS = 200
_MARKED = "Dotted lines: the step from which the run continued after a failure, a resize or another command."
_RANKS_EXPLAINED = (
    "Time that each rank spends by itself in a step, and how often the other ranks waited longest for it. Only runs on "
    "Ray measure this, by heartbeats. Below: ranks that cost the other ranks a tenth of every step or more."
)
_MOST_RANKS = 32


def page_of(course: Course) -> str:
    """Return the HTML of the report."""
    from bokeh.embed import json_item
    from bokeh.resources import Resources

    drawings = {
        "losses": figures.losses(course),
        "worlds": figures.worlds(course),
        "steps": figures.step_times(course),
        "time": figures.time_of_ranks(course),
    }
    items = []
    plots = {}
    for name, drawing in drawings.items():
        items.append(json_item(drawing.plot, name))
        plots[name] = f'{_legend(drawing.legend)}<div id="{name}"></div>'
    # The page embeds Bokeh's code, because a reader of the report may have no access to the network.
    (bokeh,) = Resources("inline", components=["bokeh"]).js_raw[:1]
    # A template with `$name` fits, because the braces of CSS and JavaScript would need escapes in a format string.
    template = Template(files("steadfast.analysis.report").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(course.directory.name),
        bokeh=bokeh,
        body="\n".join(_sections(course, plots)),
        # A text of the run could contain "</script>" and close the element.
        plots=json.dumps(items).replace("<", "\\u003c"),
    )


def _sections(course: Course, plots: Mapping[str, str]) -> Iterable[str]:
    """Yield the sections of the page.

    Args:
        course: the data of the run.
        plots: HTML of each plot with its legend, by the name of the plot.
    """
    yield _header(course)
    yield _section("Loss", _MARKED, plots["losses"], kind="wide")
    yield _section("Workers", "Number of workers on each node.", plots["worlds"])
    yield _section("Step time", "Median time of the steps between two log lines.", plots["steps"])
    yield _section("Use of time", _explained(course), _shares(course) + plots["time"], kind="wide")
    yield _section("Cost of each interruption", "", _interruptions(course), kind="wide")
    yield _section("Slow ranks", _RANKS_EXPLAINED, _rank_times(course) + _stragglers(course), kind="wide")
    yield _section("Configuration", "", _text(_config(course)))
    environment = read_json(course.directory.store, "environment.json") or {}
    yield _section("Environment", "", _text(json.dumps(environment, indent=2)))


def _header(course: Course) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(course.ledger.accounts[0].began_s))
    worth = goodput(course.totals)
    summary = course.directory.summary() or {}
    last_step, last_loss = 0, ""
    if course.figures.steps:
        last_step = course.figures.steps[-1]
        last_loss = number(course.figures.column("loss")[-1])
    tiles = {
        # Without a summary the run has not finished, and the newest log line is closest to its last step.
        "steps": str(summary.get("step", last_step)),
        "last loss": last_loss,
        "goodput": f"{worth['goodput']:.1%}",
        "wall time": duration(worth["wall_s"]),
        "attempts": str(len(course.totals.spans)),
        "failures": str(sum(each.kind == "failure" for each in course.interruptions)),
        "steps done again": str(course.totals.num_lost),
        "samples": compact(course.totals.samples),
    }
    shown = ""
    for name, value in tiles.items():
        if value:
            shown += f"<div><b>{escape(value)}</b><span>{name}</span></div>"
    told = f"{summary.get('status', 'not finished')} · began {began} · {course.directory.uri}"
    name = escape(course.directory.name)
    return f'<header><h1>{name}</h1><p>{escape(told)}</p><div class="tiles">{shown}</div></header>'


def _section(title: str, explained: str, content: str, kind: str = "") -> str:
    told = f"<p>{explained}</p>" if explained else ""
    return f'<section class="{kind}"><h2>{title}</h2>{told}{content}</section>'


def _legend(colors: Mapping[str, str]) -> str:
    if not colors:
        return ""
    keys = ""
    for label, color in colors.items():
        # A label may be the name of a node, which is a text of the run.
        keys += f"<span>{_key(color)}{escape(label)}</span>"
    return f'<div class="legend">{keys}</div>'


def _key(color: str) -> str:
    return f'<i class="key" style="background:{color}"></i>'


def _explained(course: Course) -> str:
    total_s = sum(course.ledger.rank_s().values())
    return f"{number(total_s)} seconds of all ranks, without the time between two commands."


def _shares(course: Course) -> str:
    """Return a bar and a table of the run's use of time."""
    rank_s = course.ledger.rank_s()
    # Without any time the shares are 0, instead of a division by 0.
    total_s = sum(rank_s.values()) or 1.0
    parts, rows = [], []
    for category, seconds in rank_s.items():
        color = figures.COLORS[category]
        share = f"{seconds / total_s:.1%}"
        # The browser computes the widths of the segments from the seconds.
        parts.append(f'<span style="background:{color};flex:{seconds:.3f}" title="{category}"></span>')
        row = [_cell(_key(color) + category, "key"), *_numbers(f"{seconds:,.1f} s", share)]
        rows.append([*row, _cell(CATEGORIES[category], "meaning")])
    heads = [("", ""), ("time of ranks", "number"), ("share", "number"), ("", "meaning")]
    return f'<div class="bar">{"".join(parts)}</div>{_table(heads, rows)}'


def _interruptions(course: Course) -> str:
    rows = list(map(_interruption, course.interruptions[:_MOST_ROWS]))
    if not rows:
        return "<p>The run was not interrupted.</p>"
    heads = [("", ""), ("at step", "number"), ("workers", "number"), ("why", ""), ("restored from", "")]
    heads += [("detected in", "number"), ("back in", "number"), ("steps lost", "number"), ("time lost", "number")]
    return _table(heads, rows)


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
    row = [_cell(_key(figures.color_of(each)) + each.kind, "key"), *_numbers(step, workers)]
    # The message of an exception may have pages.
    row += [_cell(escape(each.cause[:300]), "text"), _cell(escape(each.source))]
    return row + _numbers(detected, back, lost_steps, lost)


def _rank_times(course: Course) -> str:
    """Return a table of the ranks that other ranks waited for most often."""
    ranks = course.ranks()
    if not ranks:
        return ""
    rows = []
    for rank in sorted(ranks, key=lambda each: -each.last)[:_MOST_RANKS]:
        row = [str(rank.attempt), str(rank.rank), f"{rank.own_ms:.3g} ms", f"{rank.of_median:.2f}", f"{rank.last:.0%}"]
        rows.append([*_numbers(*row), _cell(escape(node_name(rank.node))), _cell(escape(rank.gpu))])
    heads = [("attempt", "number"), ("rank", "number"), ("by itself", "number"), ("of the median", "number")]
    table = _table([*heads, ("last in", "number"), ("node", ""), ("GPU", "")], rows)
    if len(ranks) > _MOST_RANKS:
        table += f"<p>And {len(ranks) - _MOST_RANKS} more ranks.</p>"
    return table


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
        row = [_cell(str(rank), "number"), _cell(escape(member)), _cell(escape(phase))]
        rows.append([*row, *_numbers(f"{max(shares):.0%}", plural(len(shares), "time"))])
    heads = [("rank", "number"), ("worker", ""), ("slow in", ""), ("of a step, at most", "number"), ("told", "number")]
    return _table(heads, rows)


def _cell(content: str, kind: str = "") -> str:
    return f'<td class="{kind}">{content}</td>' if kind else f"<td>{content}</td>"


def _numbers(*values: str) -> list[str]:
    """Return the cells of neighbouring columns of numbers."""
    return [_cell(value, "number") for value in values]


def _table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    head = body = ""
    for title, kind in heads:
        head += f'<th class="{kind}">{title}</th>'
    for row in rows:
        body += f"<tr>{''.join(row)}</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _config(course: Course) -> str:
    # The page shows the parsed configuration, not the bytes of the file, which may have any content.
    try:
        config = course.directory.stored_config()
    except SteadfastError as error:
        return str(error)
    return dump_config(config) if config else ""


def _text(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
