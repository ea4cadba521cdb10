"""Compare two configurations and classify the keys that differ."""

from typing import Any, NamedTuple

from steadfast.config.data_sections import LoaderConfig
from steadfast.config.schema import Config

# Keys that decide where and how a run executes. The keys may change between attempts without a message to the user.
FREE = ("cluster.", "scaling.", "run.resume", *(f"data.{field}" for field in LoaderConfig.model_fields))
# Keys that decide the result of the run and its lists of steps and samples. A resume refuses a change.
IDENTITY = (
    "run.seed",
    "run.init_from",
    "run.init_strict",
    "batch.global_size",
    "model.",
    "task.",
    "data.",
    "optimizer.kind",  # another kind of optimizer cannot load the state in a checkpoint
    "optimizer.target",
    "checkpoint.trainable_only",
)
# Keys that change the results of a step too, but that a resume may change.
NUMERICS = (
    "run.steps",
    "run.epochs",
    "run.deterministic",
    "run.exact",
    "batch.microbatch_size",
    "optimizer.",
    "schedule.",
    "parallel.",
    "precision.",
    "compile",
    "hooks",
    "faults.",
)


class Change(NamedTuple):
    """Key that differs between two configurations.

    The value None stands for a key that one configuration lacks.
    """

    key: str
    old: Any
    new: Any
    identity: bool  # a resume must refuse it
    free: bool  # a resume need not mention it

    @property
    def numeric(self) -> bool:
        """Return whether changing this key can change a step's results."""
        return self.identity or self.key.startswith(NUMERICS)


def diff(old: Config, new: Config) -> list[Change]:
    """Return every flat key that differs, in schema order."""
    # The values are compared as JSON, because the message shows JSON and a tuple would differ from an equal list.
    before = _flat(old.model_dump(mode="json"))
    after = _flat(new.model_dump(mode="json"))
    changes = []
    for key in before | after:
        if before.get(key) == after.get(key):
            continue
        # The keys of the loader begin with "data." as well, and a resume may change them all the same.
        free = key.startswith(FREE)
        identity = key.startswith(IDENTITY) and not free
        changes.append(Change(key, before.get(key), after.get(key), identity, free))
    return changes


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
