"""What sections are made of: rules, unions told apart by `kind` or `target`, and the scalars they hold."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic import PlainSerializer as Serializer
from pydantic import PlainValidator as Validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Rule = Callable[[Any], str | None]
Unit = Literal["steps", "epochs", "minutes", "seconds"]


def rule(key: str) -> Callable[[Rule], Rule]:
    """Mark a method of a section as a rule: it answers what is wrong with `key`, or None."""

    def mark(check: Rule) -> Rule:
        check.__dict__["rule_key"] = key
        return check

    return mark


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="after")
    def rules_hold(self) -> Self:
        """Check every rule before raising: pydantic alone would stop at the first."""
        checks = [check for check in vars(type(self)).values() if "rule_key" in getattr(check, "__dict__", ())]
        broken = [(check.rule_key, what) for check in checks if (what := check(self))]
        if broken:
            text = "; ".join(f"{key}: {what}" for key, what in broken)
            raise PydanticCustomError("rules", "{text}", {"text": text, "broken": broken})
        return self


def sections_in(annotation: Any) -> tuple[type[Section], ...]:
    """The section classes that an annotation names, in order; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_in(part))


def kind_of(section: type[Section]) -> str | None:
    """The name of a member of a union; None for the user's own code, which has no kind."""
    return section.model_fields["kind"].default if "kind" in section.model_fields else None


def choose(sections: tuple[type[Section], ...], value: Any) -> type[Section] | None:
    """The member that `value` asks for, the first if it does not say; None when it asks for none of them."""
    if not isinstance(value, dict):
        return type(value) if isinstance(value, Section) else sections[0]
    if "target" in value:
        return next((section for section in sections if "target" in section.model_fields), sections[0])
    if "kind" not in value:
        return sections[0]
    return next((section for section in sections if value["kind"] and kind_of(section) == value["kind"]), None)


class ByKind:
    """Builds a union of sections as a tagged one, so that errors speak of the chosen member only."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sections = sections_in(source)

        def tag(value: Any) -> str:
            section = choose(sections, value)
            return section.__name__ if section else ""

        return core_schema.tagged_union_schema(
            {section.__name__: handler.generate_schema(section) for section in sections},
            discriminator=tag,
            custom_error_type="unknown_kind",
            custom_error_message="unknown kind",
        )


class Target(Section):
    """The user's own code in place of a kind of ours."""

    target: Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+(\.\w+)*$")]
    """what to call, as "package.module:callable"; the working directory is on the import path"""
    args: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments of the call"""


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # which Python would take for 0 or 1
        raise ValueError("a number")
    return value


def _range(value: Any) -> Any:
    if isinstance(value, list | tuple) and len(value) == 2:
        return tuple(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    raise ValueError("a whole number or [min, max]")


NotBool = BeforeValidator(_number)
Count = Annotated[int, Field(ge=0), NotBool]
Positive = Annotated[int, Field(ge=1), NotBool]
Amount = Annotated[float, Field(ge=0), NotBool]
PositiveAmount = Annotated[float, Field(gt=0), NotBool]
Fraction = Annotated[float, Field(ge=0, lt=1), NotBool]
Text = Annotated[str, Field(min_length=1)]
Range = Annotated[tuple[Positive, Positive], BeforeValidator(_range)]


@dataclass(frozen=True)
class Every:
    """How often something happens."""

    count: int | float
    unit: Unit

    @classmethod
    def parse(cls, value: Any) -> "Every":
        """Read "200 steps", "1 epoch", "2.5 minutes". Raises ValueError that says what is wanted."""
        if isinstance(value, Every):
            return value
        match = re.fullmatch(r"(\d+(\.\d+)?) *(step|epoch|minute|second)s?", str(value).strip())
        count = float(match[1]) if match else 0.0
        if not match or count <= 0 or (match[3] == "step" and count % 1):
            raise ValueError('a count and a unit, such as "200 steps", "3 epochs" or "5 minutes"')
        return cls(count if count % 1 else int(count), cast(Unit, f"{match[3]}s"))

    def __str__(self) -> str:
        return f"{self.count} {self.unit if self.count != 1 else self.unit[:-1]}"


Interval = Annotated[Every, Validator(Every.parse), Serializer(str)]
