"""Compare configurations: which keys make them the same run, and which may change between its attempts."""

from typing import Any, NamedTuple

from app.config.schema import Config, LoaderConfig

# Where and how a run executes: any of it may differ from one attempt to the next, and nobody need be told.
FREE = ("cluster.", "scaling.", "run.resume", *(f"data.{field}" for field in LoaderConfig.model_fields))
# What the result follows from, together with the lists of steps and samples.
IDENTITY = (
    "run.seed",
    "run.init_from",
    "run.init_strict",
    "batch.global_size",
    "model.",
    "task.",
    "data.",
    "optimizer.kind",  # another kind has another state: what a checkpoint holds would be of no use to it
    "optimizer.target",
    "checkpoint.trainable_only",
)
# What the numbers of a step follow from as well, though a resume may change it.
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
    """One key that differs; None stands for a key that one side lacks."""

    key: str
    old: Any
    new: Any
    identity: bool  # a resume must refuse it
    free: bool  # a resume need not mention it

    @property
    def numeric(self) -> bool:
        """Return whether the numbers of a step may be others for it."""
        return self.identity or self.key.startswith(NUMERICS)


def diff(old: Config, new: Config) -> list[Change]:
    """Return every flat key in which two configurations differ, in the order of the schema."""
    # As JSON, because that is what the change's line shows, and a tuple would differ from the list that was read.
    before = _flat(old.model_dump(mode="json"))
    after = _flat(new.model_dump(mode="json"))
    changes = []
    for key in before | after:
        if before.get(key) == after.get(key):
            continue
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
