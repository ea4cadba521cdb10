"""Describe every configuration key, as YAML with the defaults."""

from collections.abc import Iterable, Iterator
from typing import Any, get_args

import yaml
from pydantic.fields import FieldInfo

from steadfast.config.base import Section
from steadfast.config.document import Dumper
from steadfast.config.load import parse_config
from steadfast.config.schema import Config

SECTIONS = tuple(Config.model_fields)
_REQUIRED = "..."


def describe(sections: Iterable[str]) -> str:
    """Return YAML with the defaults of these sections.

    The other kinds of each section are added as comments.
    """
    config = parse_config("", "run.yaml")
    lines: list[str] = []
    for name in sections:
        value = getattr(config, name)
        if not isinstance(value, Section):  # a list of sections, or a single key
            field = Config.model_fields[name]
            if field.description:
                lines.append(f"# {' '.join(field.description.split())}")
            lines += map(_in_one_line, kinds_in(field.annotation))
            lines += [f"{name}: {_as_yaml(config.model_dump(mode='json')[name])}", ""]
            continue
        lines.append(f"{name}:")
        lines += _indented(_keys(type(value), value), "  ")
        for other in kinds_in(Config.model_fields[name].annotation):
            if other is not type(value):
                lines.append("  # or")
                lines += _indented(_keys(other, None), "  # ")
        lines.append("")
    return "\n".join(lines[:-1])


def _keys(section: type[Section], value: Section | None) -> Iterator[str]:
    """Yield the description and default of each key of a section."""
    known = {} if value is None else value.model_dump(mode="json")
    # The kind is inherited in some sections, so the order of fields does not always put the kind first.
    for name, field in sorted(section.model_fields.items(), key=lambda item: item[0] != "kind"):
        if field.description:
            yield f"# {' '.join(field.description.split())}"
        yield from map(_in_one_line, kinds_in(field.annotation))
        yield f"{name}: {_as_yaml(known[name]) if name in known else default_of(field)}"


def kinds_in(annotation: Any) -> list[type[Section]]:
    """Return the sections that a value of this type may contain."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [kind for member in get_args(annotation) for kind in kinds_in(member)]


def _in_one_line(kind: type[Section]) -> str:
    return f"# {{{', '.join(f'{name}: {default_of(field)}' for name, field in kind.model_fields.items())}}}"


def default_of(field: FieldInfo) -> str:
    """Return the default of a key as YAML, "..." if required."""
    if field.is_required():
        return _REQUIRED
    value = field.get_default(call_default_factory=True)
    return _as_yaml(value if isinstance(value, str | int | float | dict | tuple | None) else str(value))


def _as_yaml(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.dump(plain, Dumper=Dumper, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _indented(lines: Iterable[str], indent: str) -> list[str]:
    return [indent + line for line in lines]
