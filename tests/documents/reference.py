"""Make docs/reference.md: every key of the configuration with what it takes, its default and what it means."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic.fields import FieldInfo

from steadfast.config.base import Section, kinds_in
from steadfast.config.describe import default_of
from steadfast.config.schema import Config

_HEAD = """\
# Reference

Written by `make docs` from the sections in `app/steadfast/config`; change those, not this file. The command
`steadfast config [SECTION ...]` prints the same as YAML that can be edited.

Each part is a section of the file, or one key. Where it has several kinds, `kind` chooses one, and keys of every kind
come first; `target` is a piece of your own code in its place. A key whose default is `...` must be given. A *period*
is a count and a unit: `200 steps`, `1 epoch`, `2.5 minutes`, `30 seconds`.
"""
_TABLE = ["| key | takes | default | meaning |", "|---|---|---|---|"]
_WORDS = {"boolean": "true or false", "integer": "integer", "null": "null", "number": "number", "string": "text"}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "to"}


def reference_page() -> str:
    """Return the page that lists every key, section by section."""
    lines = [_HEAD]
    for name, field in Config.model_fields.items():
        if not kinds_in(field.annotation):
            lines += [f"## `{name}`", "", *_TABLE, _row(name, field, Config.model_json_schema()), ""]
            continue
        lines += _chapter(name, field.annotation, depth=2)
        if not isinstance(field.default, Section):
            of_kinds = ", ".join(f"`{{kind: {each.kind}}}`" for each in field.default)
            lines += [f"`{name}` is a list of these, by default of {of_kinds or 'none'}.", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _chapter(key: str, annotation: Any, depth: int) -> Iterator[str]:
    """Yield a heading, a table for each kind of the section, and a chapter for each section within it."""
    yield from ["#" * depth + f" `{key}`", ""]
    kinds = kinds_in(annotation)
    within: dict[str, Any] = {}
    common: list[str] = []
    if len(kinds) > 1:
        first, *others = (list(_rows(kind)) for kind in kinds)
        common = [row for row in first if all(row in rows for rows in others)]
    if common:
        yield from ["#" * (depth + 1) + f" `{key}`, every kind", "", *_TABLE, *common, ""]
    for kind in kinds:
        if len(kinds) > 1:
            yield from ["#" * (depth + 1) + f" `{key}`, kind {_name(kind)}", ""]
        if docstring := vars(kind).get("__doc__"):
            yield from [" ".join(docstring.split()), ""]
        rows = [row for row in _rows(kind) if row not in common]
        if rows:
            yield from [*_TABLE, *rows, ""]
        for name, field in kind.model_fields.items():
            if kinds_in(field.annotation):
                within[f"{key}.{name}"] = field.annotation
    for path, nested in within.items():
        yield from _chapter(path, nested, depth + 1)


def _name(kind: type[Section]) -> str:
    return str(get_args(kind.model_fields["kind"].annotation)[0])


def _rows(kind: type[Section]) -> Iterator[str]:
    """Yield a row for each key of a section but a `kind` that its heading names."""
    schema = kind.model_json_schema()
    for name, field in kind.model_fields.items():
        if name == "kind" and len(get_args(field.annotation)) == 1:
            continue
        yield _row(name, field, schema)


def _row(name: str, field: FieldInfo, schema: dict[str, Any]) -> str:
    takes = _takes(schema["properties"][name], schema.get("$defs", {}))
    meaning = " ".join((field.description or "").split())
    cells = [f"`{name}`", takes, f"`{default_of(field)}`", meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _takes(schema: dict[str, Any], sections: dict[str, Any]) -> str:
    """Write in words what a part of a JSON schema takes."""
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(_takes(part, sections) for part in schema[union]))
    if "$ref" in schema:
        return "a section, below"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"[{', '.join(_takes(part, sections) for part in schema['prefixItems'])}]"
        case "array":
            return f"list of {_takes(schema['items'], sections)}"
        case "object":
            values = schema.get("additionalProperties")
            return f"{_takes(values, sections)} by name" if isinstance(values, dict) else "values by name"
    bounds = [f" {word} {schema[bound]}" for bound, word in _BOUNDS.items() if bound in schema]
    return schema.get("format") or _WORDS[schema["type"]] + "".join(bounds)
