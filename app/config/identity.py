"""What makes two configurations the same run, and what may change between its attempts."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from app.config.schema import Config, LoaderConfig

# Where and how a run executes: any of it may differ from one attempt to the next, and nobody need be told.
FREE = ("cluster.", "scaling.", "run.resume", *(f"data.{field}" for field in LoaderConfig.model_fields))
# What the result follows from, together with the lists of steps and samples.
IDENTITY = ("run.seed", "batch.global_size", "model.", "task.", "data.")


class Change(NamedTuple):
    """One key that differs; None stands for a key that one side lacks."""

    key: str
    old: Any
    new: Any
    identity: bool  # a resume must refuse it
    free: bool  # a resume need not mention it


def identity(config: Config) -> dict[str, Any]:
    """The flat keys that must not change on resume."""
    return {key: value for key, value in _flat(config).items() if _is_identity(key)}


def diff(old: Config, new: Config) -> list[Change]:
    """Every flat key in which two configurations differ, in the order of the schema."""
    before, after = _flat(old), _flat(new)
    return [
        Change(key, before.get(key), after.get(key), _is_identity(key), key.startswith(FREE))
        for key in before | after
        if key not in before or key not in after or before[key] != after[key]
    ]


def _is_identity(key: str) -> bool:
    return key.startswith(IDENTITY) and not key.startswith(FREE)


def _flat(config: Config) -> dict[str, Any]:
    def leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, dict):
            yield prefix, value
            return
        for key, inner in value.items():
            yield from leaves(f"{prefix}.{key}" if prefix else str(key), inner)

    return dict(leaves("", config.model_dump(mode="json")))
