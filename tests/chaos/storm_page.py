"""The table of the storms as text, and the page with its picture.

`python -m tests.chaos.storm_page runs/storm/storm.json` writes table, picture and figures into `docs/`.
"""

import html
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.chaos.storm import Outcome

_DOCS = Path("docs")
_BEGIN, _END = "<!-- table -->", "<!-- end of the table -->"
# Of the documentation's table: titles by column. The other columns are in the JSON.
_PUBLISHED = {
    "wall_s": "wall s",
    "ettr": "ETTR",
    "num_faults": "faults",
    "stall_s": "stall s",
    "num_commands": "commands",
    "wasted_steps": "steps done again",
    "worker_s": "worker s",
    "samples_strayed": "samples lost or twice",
    "difference": "difference",
    "equal": "equal bits",
}

_FIELDS = [field.name for field in fields(Outcome)]
COLUMNS = _FIELDS[_FIELDS.index("wall_s") : _FIELDS.index("equal") + 1]
_REASONS = {
    "step_overhead": "measured without faults only",
    "stall_s": "no fault that is seen at once",
}
_COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#8d5a97", "#edae49", "#2e4057", "#a0785a")
_WIDTH, _HEIGHT, _LEFT, _TOP = 860, 240, 60, 30


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table, with a reason for each figure that is missing."""
    rows: list[tuple[str, ...]] = [("storm", "contender", *COLUMNS)]
    for name, group in _storms(outcomes):
        for index, outcome in enumerate(group):
            figures = [_shown(getattr(outcome, column)) for column in COLUMNS]
            rows.append(("" if index else name, outcome.contender, *figures))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", *_notes(outcomes)])


def page(outcomes: Sequence[Outcome], facts: Mapping[str, Any]) -> str:
    """Return a page of HTML with a picture of each storm, the table and what it was made with."""
    parts = [_STYLE, "<h1>The same work under the same faults</h1>"]
    parts.append(f"<p>{html.escape(_facts(facts))}</p>")
    for name, group in _storms(outcomes):
        parts.append(f"<h2>{html.escape(name)}</h2>{picture(group)}")
    return "\n".join([*parts, f"<pre>{html.escape(table(outcomes))}</pre>"])


def picture(outcomes: Sequence[Outcome]) -> str:
    """Return an SVG of one storm: the step over time, a line for each contender, with a tick for each fault."""
    longest_s = max((at_s for outcome in outcomes for at_s, _ in outcome.progress), default=1.0) or 1.0
    most = max(outcome.num_steps for outcome in outcomes)
    height = _HEIGHT + _TOP + 40
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>'
    ]

    def place(at_s: float, step: float) -> tuple[float, float]:
        return _LEFT + _WIDTH * at_s / longest_s, _TOP + _HEIGHT * (1 - step / most)

    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = place(longest_s * share, most * share)
        shapes.append(f'<path d="M{_LEFT} {y:.1f}H{_LEFT + _WIDTH}" stroke="#ddd"/>')
        shapes.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{most * share:.0f}</text>')
        shapes.append(
            f'<text x="{x:.1f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{longest_s * share:.0f} s</text>'
        )
    for index, outcome in enumerate(outcomes):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in outcome.progress))
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for at_s, fault in outcome.strikes:
            x, y = place(min(at_s, longest_s), _step_at(outcome, at_s))
            title = html.escape(f"{outcome.contender}: {fault}, {at_s:.0f} s")
            shapes.append(
                f'<path d="M{x:.1f} {y - 5:.1f}v10" stroke="{colour}" stroke-width="2"><title>{title}</title></path>'
            )
        shapes.append(
            f'<text x="{_LEFT + 125 * index}" y="{_TOP - 12}" fill="{colour}">{html.escape(outcome.contender)}</text>'
        )
    return "".join([*shapes, "</svg>"])


def _step_at(outcome: Outcome, at_s: float) -> int:
    return max((step for time_s, step in outcome.progress if time_s <= at_s), default=0)


def _storms(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    return [(name, list(group)) for name, group in groupby(outcomes, key=lambda outcome: outcome.storm)]


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    notes = [f"{outcome.contender}, {outcome.storm}: {outcome.note}" for outcome in outcomes if outcome.note]
    done = [outcome for outcome in outcomes if outcome.wall_s is not None]
    for column, reason in _REASONS.items():
        if any(getattr(outcome, column) is None for outcome in done):
            notes.append(f"{column} -: {reason}")
    return notes


def _facts(facts: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    return f"{facts['machine']}; {versions}; seed {facts['seed']}"


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


_STYLE = """<!doctype html><meta charset="utf-8"><title>Steadfast: storms</title>
<style>body{font:14px sans-serif;margin:2em;max-width:1200px}svg{width:100%}pre{font-size:12px;overflow:auto}</style>"""


def publish(file: Path) -> None:
    """Write the figures of a call into the documentation."""
    document = json.loads(file.read_text())
    outcomes = [Outcome(**outcome) for outcome in document["outcomes"]]
    pictured = next(group for _, group in _storms(outcomes) if len({len(outcome.strikes) for outcome in group}) > 1)
    (_DOCS / "storms.svg").write_text(picture(pictured))
    for outcome in document["outcomes"]:
        del outcome["progress"]
    (_DOCS / "storms.json").write_text(json.dumps(document, indent=1) + "\n")
    page = _DOCS / "storms.md"
    before, _, rest = page.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    parts = [
        f"{before}{_BEGIN}\n",
        f"{_facts(document)}.\n",
        _markdown(outcomes),
        "",
        *_notes(outcomes),
        "",
        f"{_END}{after}",
    ]
    page.write_text("\n".join(parts))


def _markdown(outcomes: Sequence[Outcome]) -> str:
    overheads = {outcome.contender: outcome.step_overhead for outcome in outcomes if outcome.step_overhead is not None}
    lines = [f"| storm | contender | {' | '.join(_PUBLISHED.values())} |", "|---" * (len(_PUBLISHED) + 2) + "|"]
    for name, group in _storms(outcomes):
        for index, outcome in enumerate(group):
            figures = [_shown(getattr(outcome, column)) for column in _PUBLISHED]
            lines.append(f"| {'' if index else name} | {outcome.contender} | {' | '.join(figures)} |")
    shown = ", ".join(f"{name} {overhead:+.1%}" for name, overhead in overheads.items())
    return "\n".join([*lines, "", f"Overhead of a step without faults, compared with torchrun: {shown}."])


if __name__ == "__main__":
    publish(Path(sys.argv[1]))
