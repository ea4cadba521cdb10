"""Tables of docs/json.md, compared with documents that verbs print."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parents[2] / "docs" / "json.md"
_ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "true or false": (bool,),
    "event": (dict,),
    "object": (dict,),
    "value": (object,),
}


def check_document(section: str, document: dict[str, Any], table: int = 0) -> None:
    """Claim: a document has the fields of a table, each of the type that the table gives.

    Args:
        section: heading in docs/json.md.
        table: number of the table in the section.
    """
    _, found, text = _PAGE.read_text().partition(f"\n## {section}\n")
    assert found, f"docs/json.md has no section {section}"
    tables = text.partition("\n## ")[0].split("| field | type | meaning |")[1:]
    rows = {name: kind for name, kind, _ in _ROW.findall(tables[table])}
    wrong = list(_differences("", document, rows))
    assert not wrong, f"docs/json.md, {section}: {'; '.join(wrong)}"


def _differences(prefix: str, found: dict[str, Any], rows: dict[str, str]) -> Iterator[str]:
    here = {}
    for name, kind in rows.items():
        if re.fullmatch(re.escape(prefix) + r"\w+", name):
            here[name.removeprefix(prefix)] = kind
    for name in found.keys() - here.keys():
        yield f"no row for {prefix}{name}"
    for name in here.keys() - found.keys():
        yield f"{prefix}{name} is in no document"
    for name in found.keys() & here.keys():
        value, kind = found[name], here[name]
        if not _fits(value, kind):
            yield f"{prefix}{name} is {value!r}, and no {kind}"
        elif kind.startswith("list of objects"):
            for each in filter(None, value or ()):
                yield from _differences(f"{prefix}{name}[].", each, rows)
        elif kind.startswith("object") and value is not None:
            yield from _differences(f"{prefix}{name}.", value, rows)


def _fits(value: Any, kind: str) -> bool:
    if value is None:
        return kind == "value" or kind.endswith(" or null")
    kind = kind.removesuffix(" or null")
    if kind.startswith("list of "):
        of = kind.removeprefix("list of ").removesuffix("s")
        return isinstance(value, list) and all(each is None or _fits(each, of) for each in value)
    if kind.endswith(" by name"):
        return isinstance(value, dict)
    # Python counts True as an integer.
    return isinstance(value, _TYPES[kind]) and (kind in ("true or false", "value") or not isinstance(value, bool))
