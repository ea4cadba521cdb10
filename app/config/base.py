"""What sections are made of: a frozen model, the user's own code as a section, and the scalars they hold."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    Tag,
)
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,  # a default may break a rule too, once a field beside it is set
        use_attribute_docstrings=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )


def at_most(limit: int | None, name: str, section: Section, key: str) -> None:
    """A rule across sections: `key` must not exceed the `limit` that `name` sets, where both are there."""
    value = getattr(section, key, 0)
    if limit is not None and value > limit:
        said = {"key": key, "name": name, "limit": limit, "value": value}
        raise PydanticCustomError("at_most", "must be at most {name} ({limit}), found {value}", said)


class Target(Section):
    """The user's own code in place of a kind of ours."""

    kind: Literal["target"] = "target"
    target: Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+(\.\w+)*$")]
    """what to call, as "package.module:callable"; the working directory is on the import path"""
    args: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments of the call"""


def _both_ends(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Range = Annotated[tuple[PositiveInt, PositiveInt], BeforeValidator(_both_ends)]

# Told apart by the value's type, so that what is wrong with one is not also said of the other.
BALANCES = ("a known balance", "weights")
Balance = Annotated[
    Annotated[Literal["even", "speed"], Tag(BALANCES[0])]
    | Annotated[dict[Text, PositiveFloat], Field(min_length=1), Tag(BALANCES[1])],
    Discriminator(lambda value: BALANCES[isinstance(value, dict)]),
]

Unit = Literal["steps", "epochs", "minutes", "seconds"]


@dataclass(frozen=True)
class Every:
    """How often something happens."""

    count: int | float
    unit: Unit

    @classmethod
    def parse(cls, value: Any) -> "Every":
        """Read "200 steps", "1 epoch", "2.5 minutes"."""
        if isinstance(value, Every):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *(step|epoch|minute|second)s?", str(value))
        count = float(match[1]) if match else 0.0
        if not match or count == 0 or (match[2] == "step" and count % 1):
            raise ValueError('must be a count and a unit, such as "200 steps", "3 epochs" or "5 minutes"')
        return cls(count if count % 1 else int(count), cast(Unit, f"{match[2]}s"))

    def __str__(self) -> str:
        return f"{self.count} {self.unit if self.count != 1 else self.unit[:-1]}"


Interval = Annotated[Every, PlainValidator(Every.parse), PlainSerializer(str)]
