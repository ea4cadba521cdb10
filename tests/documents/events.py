"""Make docs/events.md: every event with its fields, from app/steadfast/run/events.py."""

import ast
import io
import re
import tokenize
from pathlib import Path

import steadfast
from steadfast.run import events

_HEAD = """\
# Events

Written by `make docs` from `app/steadfast/run/events.py`; change that file, not this one.

`events.jsonl` in a run directory has one line of JSON for each event, oldest first, `log` excepted: its lines are in
`metrics.jsonl`. Scripts may rely on names and fields. Beside the fields below each line has `event` (the name),
`time_s` (Unix time) and, within an attempt, `attempt` (its number). Units are in names: `_s` seconds, `_ms`
milliseconds, `_bytes` bytes. A field that is *optional* is left out where it is not known.
"""

# How JSON calls what a field's annotation names.
_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "true or false", "Any": "value"}


def events_page() -> str:
    """Return the page that lists every event with its fields, in the order of their classes."""
    source = Path(events.__file__).read_text()
    comments = _comments(source)
    parts = [_HEAD]
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name != "Event":
            parts.append(_section(node, comments))
        if isinstance(node, ast.ClassDef) and node.name == "Notice":
            parts.append(_notices())
    return "\n".join(parts)


def _notices() -> str:
    """Return the table of notices with a name of their own, from the calls that make them."""
    fields: dict[str, list[str]] = {}
    for path in sorted(Path(steadfast.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            given = {each.arg: each.value for each in getattr(node, "keywords", [])}
            name = given.get("event")
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                known = fields.setdefault(name.value, [])
                known += [each for each in given if each not in ("event", "text", "attempt", *known)]
    rows = [f"| `{name}` | {', '.join(f'`{each}`' for each in known)} |" for name, known in sorted(fields.items())]
    lines = ["Notices with a name of their own, and their fields beside `text`:", "", "| event | fields |", "|---|---|"]
    return "\n".join([*lines, *rows]) + "\n"


def _section(node: ast.ClassDef, comments: dict[int, tuple[bool, str]]) -> str:
    event: type[events.Event] = getattr(events, node.name)
    docstring = " ".join((ast.get_docstring(node) or "").split())
    lines = [f"## `{event.name}`", "", docstring]
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    rows = [_row(each, comments) for each in fields if "ClassVar" not in ast.unparse(each.annotation)]
    if rows:
        lines += ["", "| field | type | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _row(field: ast.AnnAssign, comments: dict[int, tuple[bool, str]]) -> str:
    kind, none, _ = ast.unparse(field.annotation).partition(" | None")
    optional = ", optional" if none else ""
    return f"| `{ast.unparse(field.target)}` | {_in_words(kind)}{optional} | {_comment_of(field, comments)} |"


def _in_words(annotation: str) -> str:
    """Write an annotation as JSON has it: `tuple[int, ...]` is a list of integer."""
    if matched := re.fullmatch(r"tuple\[(\w+), .*\]", annotation):
        return f"list of {_TYPES[matched[1]]}"
    if matched := re.fullmatch(r"Mapping\[str, (.+)\]", annotation):
        return f"{_in_words(matched[1])} by name"
    return _TYPES[annotation]


def _comments(source: str) -> dict[int, tuple[bool, str]]:
    """Return the comments by line, each with whether it has the line to itself."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found[token.start[0]] = token.line.lstrip().startswith("#"), token.string.lstrip("# ")
    return found


def _comment_of(field: ast.AnnAssign, comments: dict[int, tuple[bool, str]]) -> str:
    """Return what stands behind a field, or on the lines above it."""
    if field.lineno in comments:
        return comments[field.lineno][1]
    above: list[str] = []
    line = field.lineno - 1
    while comments.get(line, (False, ""))[0]:
        above.insert(0, comments[line][1])
        line -= 1
    return " ".join(above)
