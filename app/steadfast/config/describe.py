"""Describe every configuration key: as YAML with the defaults, and as a JSON schema for editors."""

from collections.abc import Iterable, Iterator
from typing import Any

import yaml
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from steadfast.config.base import Section, kinds_in
from steadfast.config.document import Dumper
from steadfast.config.load import parse_config
from steadfast.config.schema import Config

SECTIONS = tuple(Config.model_fields)
_REQUIRED = "..."


class _FileSchema(GenerateJsonSchema):
    """Schema of a section whose kind the file may leave out."""

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        # Without its kind, a section such as {lr: 1e-3} fits several members, and `oneOf` would refuse it.
        found = super().tagged_union_schema(schema)
        found["anyOf"] = found.pop("oneOf")
        return found


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file."""
    return {"$schema": _FileSchema.schema_dialect, **Config.model_json_schema(schema_generator=_FileSchema)}


def describe(sections: Iterable[str]) -> str:
    """Return YAML with the defaults of these sections.

    The other kinds of each section are added as comments.
    """
    # The default of run.name is the stem of the file's name.
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
        # A rule may replace the default of a field: run.steps is 2000 unless run.epochs is given.
        if name in known:
            yield f"{name}: {_as_yaml(known[name])}"
        else:
            yield f"{name}: {default_of(field)}"


def _in_one_line(kind: type[Section]) -> str:
    entries = [f"{name}: {default_of(field)}" for name, field in kind.model_fields.items()]
    return f"# {{{', '.join(entries)}}}"


def default_of(field: FieldInfo) -> str:
    """Return the default of a key as YAML, "..." if required."""
    if field.is_required():
        return _REQUIRED
    value = field.get_default(call_default_factory=True)
    if not isinstance(value, str | int | float | dict | tuple | None):
        value = str(value)
    return _as_yaml(value)


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10**6)
    # PyYAML ends a document that is a single value by a line of three dots.
    return text.removesuffix("\n").removesuffix("\n...")


def _indented(lines: Iterable[str], indent: str) -> list[str]:
    return [indent + line for line in lines]
