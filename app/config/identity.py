"""What makes two configurations the same run, and what may change between its attempts."""

from typing import Any, NamedTuple

from app.config.schema import Config, LoaderConfig

# Where and how a run executes: any of it may differ from one attempt to the next, and nobody need be told.
FREE = ("cluster.", "scaling.", "run.resume", *(f"data.{field}" for field in LoaderConfig.model_fields))
# What the result follows from, together with the lists of steps and samples.
IDENTITY = ("run.seed", "run.init_from", "batch.global_size", "model.", "task.", "data.")


class Change(NamedTuple):
    """One key that differs; None stands for a key that one side lacks."""

    key: str
    old: Any
    new: Any
    identity: bool  # a resume must refuse it
    free: bool  # a resume need not mention it


def diff(old: Config, new: Config) -> list[Change]:
    """Every flat key in which two configurations differ, in the order of the schema."""
    before, after = (_flat(config.model_dump(mode="json")) for config in (old, new))
    changes = []
    for key in before | after:
        if before.get(key) != after.get(key):
            free = key.startswith(FREE)
            changes.append(Change(key, before.get(key), after.get(key), key.startswith(IDENTITY) and not free, free))
    return changes


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
