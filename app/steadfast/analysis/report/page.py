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
    items = [json_item(drawing.plot, name) for name, drawing in drawings.items()]
    legends = {name: _legend(drawing.legend) for name, drawing in drawings.items()}
    (bokeh,) = Resources("inline", components=["bokeh"]).js_raw[:1]
    template = Template(files("steadfast.analysis.report").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(_name(course)),
        bokeh=bokeh,
        body="\n".join(_sections(course, legends)),
        # A text of the run could contain "</script>" and close the element.
        plots=json.dumps(items).replace("<", "\\u003c"),
    )


def _sections(course: Course, legends: Mapping[str, str]) -> Iterable[str]:
    """Yield the sections of the page.

    Args:
        course: the data of the run.
        legends: HTML of each plot's legend, by the name of the plot.
    """
    plots = {name: f'{legend}<div id="{name}"></div>' for name, legend in legends.items()}
    yield _header(course)
    yield _section("Loss", _MARKED, plots["losses"], wide=True)
    yield _section("Workers", "Number of workers on each node.", plots["worlds"])
    yield _section("Step time", "Median time of the steps between two log lines.", plots["steps"])
    yield _section("Use of time", _explained(course), _shares(course) + plots["time"], wide=True)
    yield _section("Cost of each interruption", "", _interruptions(course), wide=True)
    yield _section("Slow ranks", _RANKS_EXPLAINED, _rank_times(course) + _stragglers(course), wide=True)
    yield _section("Configuration", "", _text(_config(course)))
    environment = read_json(course.directory.store, "environment.json") or {}
    yield _section("Environment", "", _text(json.dumps(environment, indent=2)))


def _name(course: Course) -> str:
    return course.directory.uri.rstrip("/").rpartition("/")[2]


def _header(course: Course) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(course.ledger.accounts[0].began_s))
    worth = goodput(course.totals)
    summary = course.directory.summary() or {}
    steps, losses = course.figures.steps, course.figures.column("loss")
    tiles = {
        "steps": str(summary.get("step", steps[-1] if steps else 0)),
        "last loss": number(losses[-1]) if losses else "",
        "goodput": f"{worth['goodput']:.1%}",
        "wall time": duration(worth["wall_s"]),
        "attempts": str(len(course.totals.spans)),
        "failures": str(sum(each.kind == "failure" for each in course.interruptions)),
        "steps done again": str(course.totals.num_lost),
        "samples": compact(course.totals.samples),
    }
    shown = "".join(f"<div><b>{escape(value)}</b><span>{name}</span></div>" for name, value in tiles.items() if value)
    told = f"{summary.get('status', 'not finished')} · began {began} · {course.directory.uri}"
    return f'<header><h1>{escape(_name(course))}</h1><p>{escape(told)}</p><div class="tiles">{shown}</div></header>'


def _section(title: str, explained: str, content: str, wide: bool = False) -> str:
    told = f"<p>{explained}</p>" if explained else ""
    return f'<section class="{"wide" if wide else ""}"><h2>{title}</h2>{told}{content}</section>'


def _legend(colors: Mapping[str, str]) -> str:
    keys = [f"<span>{_key(color)}{escape(label)}</span>" for label, color in colors.items()]
    return f'<div class="legend">{"".join(keys)}</div>' if keys else ""


def _key(color: str) -> str:
    return f'<i class="key" style="background:{color}"></i>'


def _explained(course: Course) -> str:
    total_s = sum(course.ledger.rank_s().values())
    return f"{number(total_s)} seconds of all ranks, without the time between two commands."


def _shares(course: Course) -> str:
    """Return a bar and a table of the run's use of time."""
    rank_s = course.ledger.rank_s()
    total_s = sum(rank_s.values()) or 1.0
    parts, rows = [], []
    for category, seconds in rank_s.items():
        color = figures.COLORS[category]
        share = f"{seconds / total_s:.1%}"
        parts.append(f'<span style="background:{color};flex:{seconds:.3f}" title="{category}"></span>')
        row = [_cell(_key(color) + category, "key"), _cell(f"{seconds:,.1f} s", "number"), _cell(share, "number")]
        rows.append([*row, _cell(CATEGORIES[category], "meaning")])
    heads = [("", ""), ("time of ranks", "number"), ("share", "number"), ("", "meaning")]
    return f'<div class="bar">{"".join(parts)}</div>{_table(heads, rows)}'


def _interruptions(course: Course) -> str:
    rows = []
    for each in course.interruptions[:_MOST_ROWS]:
        row = [_cell(_key(figures.color_of(each)) + each.kind, "key")]
        row.append(_cell("" if each.step is None else str(each.step), "number"))
        row.append(_cell("{} → {}".format(*each.workers) if each.workers else "", "number"))
        row += [_cell(escape(each.cause[:300]), "text"), _cell(escape(each.source))]
        seconds = [each.detected_s, each.back_s]
        numbers = ["" if value is None else f"{value:.1f} s" for value in seconds]
        numbers += [str(each.lost_steps), f"{each.lost_s:.1f} s"] if each.attempt else ["", "not back yet"]
        rows.append(row + [_cell(value, "number") for value in numbers])
    if not rows:
        return "<p>The run was not interrupted.</p>"
    heads = [("", ""), ("at step", "number"), ("workers", "number"), ("why", ""), ("restored from", "")]
    heads += [(head, "number") for head in ("detected in", "back in", "steps lost", "time lost")]
    return _table(heads, rows)


def _rank_times(course: Course) -> str:
    """Return a table of the ranks that other ranks waited for most often."""
    ranks = course.ranks()
    if not ranks:
        return ""
    rows = []
    for rank in sorted(ranks, key=lambda each: -each.last)[:_MOST_RANKS]:
        row = [str(rank.attempt), str(rank.rank), f"{rank.own_ms:.3g} ms", f"{rank.of_median:.2f}", f"{rank.last:.0%}"]
        place = [_cell(escape(node_name(rank.node))), _cell(escape(rank.gpu))]
        rows.append([*(_cell(value, "number") for value in row), *place])
    heads = [(head, "number") for head in ("attempt", "rank", "by itself", "of the median", "last in")]
    left = f"<p>And {len(ranks) - _MOST_RANKS} more ranks.</p>" if len(ranks) > _MOST_RANKS else ""
    return _table([*heads, ("node", ""), ("GPU", "")], rows) + left


def _stragglers(course: Course) -> str:
    found: dict[tuple[int, str, str], list[events.Straggler]] = {}
    for event in course.told.get(events.Straggler, []):
        found.setdefault((event.rank, event.member, event.phase), []).append(event)
    if not found:
        return "<p>No rank cost the other ranks that much.</p>"
    rows = []
    slowest = sorted(found.items(), key=lambda each: -max(event.share for event in each[1]))
    for (rank, member, phase), told in slowest[:_MOST_ROWS]:
        worst = max(told, key=lambda event: event.share)
        row = [_cell(str(rank), "number"), _cell(escape(member)), _cell(escape(phase))]
        rows.append([*row, _cell(f"{worst.share:.0%}", "number"), _cell(plural(len(told), "time"), "number")])
    heads = [("rank", "number"), ("worker", ""), ("slow in", ""), ("of a step, at most", "number"), ("told", "number")]
    return _table(heads, rows)


def _cell(content: str, kind: str = "") -> str:
    return f'<td class="{kind}">{content}</td>' if kind else f"<td>{content}</td>"


def _table(heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th class="{kind}">{title}</th>' for title, kind in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
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
