"""Base classes and scalar types of the configuration schema."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic.types import PositiveFloat, PositiveInt

IN_WORDS = {
    r"^[A-Za-z0-9_][A-Za-z0-9._-]*$": "must have letters, digits, ., _ and - alone, and begin with none of . and -",
    r"^[A-Za-z_]\w*$": "must have letters, digits and _ alone, and begin with no digit",
    r"^(\w+(\.\w+)*|<live [a-z0-9.]+>):\w+(\.\w+)*$": "must be package.module:name",
}
NAME, _VARIABLE, _TARGET = IN_WORDS


class Section(BaseModel):
    """Frozen part of the configuration that refuses unknown keys.

    Default values are checked like values that the user gives.
    """

    model_config = ConfigDict(
        frozen=True,
        # A misspelt key that is silently ignored would waste a whole run.
        extra="forbid",
        allow_inf_nan=False,
        # A default can break a rule as well, once the user sets another field of the section.
        validate_default=True,
        # The text below a key is its description in the output of `config` and in docs/reference.md.
        use_attribute_docstrings=True,
        protected_namespaces=(),
        # The arguments of a target may be infinite. This format loads back as an equal value.
        ser_json_inf_nan="constants",
    )

    def replace(self, key: str, value: Any) -> Self:
        """Return a copy with another value of a key such as "scaling.num_workers".

        The value is not checked. Raises AttributeError for an unknown key.
        """
        name, _, rest = key.partition(".")
        former = getattr(self, name)
        return self.model_copy(update={name: former.replace(rest, value) if rest else value})

    @model_validator(mode="before")
    @classmethod
    def true_is_no_number(cls, values: Any) -> Any:
        # Python treats True as 1, so `steps: true` would be a run of one step. Pydantic refuses the text "true".
        # Anything but a dict is refused by pydantic itself, or is a section that was checked before.
        if not isinstance(values, dict):
            return values
        found = dict(values)
        for name, field in cls.model_fields.items():
            if name in found and _takes(field.annotation, int, float) and not _takes(field.annotation, bool, Any):
                found[name] = _without_bools(found[name])
        return found


def _takes(annotation: Any, *kinds: Any) -> bool:
    return annotation in kinds or any(_takes(part, *kinds) for part in get_args(annotation))


def _without_bools(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return list(map(_without_bools, value))
    if isinstance(value, dict):
        return {key: _without_bools(part) for key, part in value.items()}
    if isinstance(value, bool):
        return str(value).lower()
    return value


def kinds_in(annotation: Any) -> list[type[Section]]:
    """Return the sections that a value of this type may contain."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    kinds: list[type[Section]] = []
    for part in get_args(annotation):
        kinds += kinds_in(part)
    return kinds


class Target(Section):
    """Section that names the user's code in place of a built-in kind."""

    kind: Literal["target"] = "target"
    # A name in angle brackets belongs to an object that a program passed to `steadfast.fit`.
    target: Annotated[str, Field(pattern=_TARGET)]
    """what to call, as "package.module:callable"; the working directory is on the import path"""
    args: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments with which the target is called"""
    # A private attribute is no key: it is neither written to config.yaml nor compared with the run's configuration.
    _given: Callable[..., Any] | None = PrivateAttr(None)

    @classmethod
    def of_object(cls, key: str, name: str, build: Callable[..., Any], **values: Any) -> Self:
        """Return a section for an object that a program gave to `fit`.

        Args:
            key: the section's key in the configuration.
            name: name of the object in messages and in config.yaml.
            build: called in place of a target.
            values: values of the section's other keys.
        """
        # The angle brackets keep the name apart from every import path: a resume without the object is refused.
        section = cls(target=f"<live {key}>:{re.sub('[^a-zA-Z0-9_]', '_', name)}", **values)
        section._given = build
        return section

    @property
    def given(self) -> Callable[..., Any] | None:
        """Return the callable to use in place of the target, None without one."""
        return self._given

    def hold(self, build: Callable[..., Any]) -> None:
        """Keep the object of a program, which this process has received beside the configuration."""
        self._given = build

    def __getstate__(self) -> dict[Any, Any]:
        # Objects travel beside the configuration: a worker must be able to read its configuration, and install packages
        # as it says, before the worker can load the objects.
        return {**super().__getstate__(), "__pydantic_private__": {"_given": None}}


def _as_range(value: Any) -> Any:
    if isinstance(value, int):
        return value, value
    return value


Fraction = Annotated[float, Field(ge=0, lt=1)]


def _as_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return value


def _as_text(value: Any) -> Any:
    # A bool is refused: YAML reads `yes` as True, and the user may have meant "yes", "true" or "1".
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


def _as_writable(value: str) -> str:
    if "\0" in value:  # YAML can write NUL, but no path can contain it
        raise ValueError("must not have NUL in it")
    return value


def _as_list(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    return value


Pattern = Annotated[str, AfterValidator(_as_pattern)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_as_writable)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_as_list, json_schema_input_type=Text | tuple[Text, ...])]
Variable = Annotated[str, Field(pattern=_VARIABLE)]
Value = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | int | float)]
_Ends = tuple[PositiveInt, PositiveInt]
Range = Annotated[_Ends, BeforeValidator(_as_range, json_schema_input_type=PositiveInt | _Ends)]

# The value's type selects the member of the union. Without the tags pydantic would report the errors of both members.
BALANCES = ("a known balance", "weights")
Balance = Annotated[
    Annotated[Literal["even", "even_samples", "speed"], Tag(BALANCES[0])]
    | Annotated[dict[Text, PositiveFloat], Field(min_length=1), Tag(BALANCES[1])],
    Discriminator(lambda value: BALANCES[isinstance(value, dict)]),
]

ORDERS = ("a known order", "an order by target")
Order = Annotated[
    Annotated[Literal["shuffled", "blocks", "sequential"], Tag(ORDERS[0])] | Annotated[Target, Tag(ORDERS[1])],
    Discriminator(lambda value: ORDERS[isinstance(value, dict | Target)]),
]

Unit = Literal["steps", "epochs", "minutes", "seconds"]


@dataclass(frozen=True)
class Every:
    """Period as a count of steps, epochs, minutes or seconds."""

    count: int | float
    unit: Unit

    @classmethod
    def parse(cls, value: Any) -> "Every":
        """Parse a period such as "200 steps", "1 epoch" or "2.5 minutes"."""
        # Defaults are periods already, and are validated as well.
        if isinstance(value, Every):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *(step|epoch|minute|second)s?", str(value))
        if match:
            number = float(match[1])
            count: int | float = int(number) if number.is_integer() else number
            # A step cannot be divided. Half an epoch or half a minute is valid.
            if count > 0 and (isinstance(count, int) or match[2] != "step"):
                return cls(count, cast(Unit, f"{match[2]}s"))
        raise ValueError('must be a count and a unit, such as "200 steps", "3 epochs" or "5 minutes"')

    def __str__(self) -> str:
        text = f"{self.count} {self.unit}"
        if self.count == 1:
            return text.removesuffix("s")
        return text


# A period is written as text, because config.yaml must load back as an equal configuration.
Interval = Annotated[
    Every, PlainValidator(Every.parse), PlainSerializer(str), WithJsonSchema({"type": "string", "format": "period"})
]
