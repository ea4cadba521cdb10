"""Load a configuration file and overrides into a Config.

All problems are reported together, each with its line, the value found and the nearest valid name.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from steadfast.config.base import BALANCES, IN_WORDS, ORDERS, Section, kinds_in
from steadfast.config.document import Document, Dumper, Keys, read_text
from steadfast.config.schema import Config
from steadfast.errors import ConfigError, Problem

CONFIGS = Path(__file__).parents[3] / "configs"
QUOTED = re.compile(r"'(.*?)'")  # a name in pydantic's list of expected values
# Pydantic adds the member of a union to the keys of an error, although the configuration has no such key.
UNION_MEMBERS = ("literal['auto']", "bool", "constrained-int", *BALANCES, *ORDERS)
# Former names of keys. A file that a user gives is refused with the new name; the configuration in a run directory is
# read.
_RENAMED = {"recovery.stall_s": "recovery.hang_limit_s", "audit.recompute": "recompute.every"}
# Removed keys with the value that every run has now. A run directory with another value is refused, because the run
# would go on with other results.
_ALWAYS: dict[str, Any] = {
    "parallel.bucket_cap_mb": None,
    "precision.loss_scale": {"initial": 65536.0, "factor": 2.0, "window": 2000},
    "schedule.rising_fraction": 0.3,
    "schedule.start_divisor": 25.0,
    "schedule.end_divisor": 1e4,
}
# Removed keys. A file that a user gives is refused with what to do instead; in the configuration in a run directory
# they are ignored.
_OWN_PROFILER = "the key was removed. A hook of your own may run torch.profiler with any of its arguments"
_REMOVED = {
    "recovery.mode": "the key was removed, because surviving workers always keep running. Leave it out",
    "profile.flight_recorder": "the key was removed. Set TORCH_FR_BUFFER_SIZE in cluster.env",
    **{f"profile.{key}": _OWN_PROFILER for key in ("warmup", "repeat", "shapes", "stack", "memory", "flops")},
    **{key: f"the key was removed, and its value is always {json.dumps(value)}" for key, value in _ALWAYS.items()},
    "data.prefetch_factor": "the key was removed. Raise data.num_workers to read more samples ahead",
    "trackers.tags": "the key was removed. Set WANDB_TAGS",
    "trackers.mode": "the key was removed. Set WANDB_MODE",
}
# Keys of other trainers that this schema lacks. The nearest valid name would be misleading, so the error names the
# equivalent instead.
_OWN_ORDER = "data.order=sequential reads samples as the dataset has them, and a target there in an order of your own"
_INSTEAD = {
    **{former: f"the key is called {name} now" for former, name in _RENAMED.items()},
    **_REMOVED,
    "parallel.kind=data_parallel": "use parallel.kind=ddp, with a worker for each GPU",
    "audit": "the key audit.recompute is called recompute.every now",
    "data.shuffle": _OWN_ORDER,
    "data.sampler": _OWN_ORDER,
    "data.batch_sampler": _OWN_ORDER,
    "parallel.find_unused_parameters": (
        "parameters that a step does not use are fine without it, with reducer=steadfast, the default"
    ),
    "parallel.sync_batchnorm": (
        "BatchNorm has the statistics of a microbatch, and the same running ones at any number of workers; for larger "
        "groups raise batch.microbatch_size"
    ),
}


def load_config(file: str, overrides: Sequence[str] = ()) -> Config:
    """Read FILE and apply the overrides.

    FILE is searched in the working directory, then in configs/. Raises ConfigError.
    """
    for path, name in ((Path(file), file), (CONFIGS / file, f"configs/{file}")):
        # The name itself may be the error: the system refuses one that is too long, so the message shortens it.
        try:
            if path.is_file():
                return parse_config(read_text(path, name), name, overrides)
        except OSError as error:
            raise ConfigError([Problem(name[:200], "", f"cannot be read: {error.strerror}")]) from error
    known = [path.name for path in CONFIGS.glob("*.yaml")]
    what = "no such file. An installed package has no configs/: give a path, or write a starter by steadfast init"
    if known:
        what = f"no such file, here or in configs/{suggestion(Path(file).name, known)}"
    raise ConfigError([Problem(file, "", what)])


def parse_config(
    text: str, file: str = "config.yaml", overrides: Sequence[str] = (), former_names: bool = False
) -> Config:
    """Return the configuration that `text` holds.

    `file` names the text in errors, and its stem is the default name of the run. `former_names` says whether former
    names of keys are read and removed keys ignored. Raises ConfigError.
    """
    document = Document(text, file)
    # Before the overrides, which come from the user of this version and must have its names.
    if former_names:
        _read_former_keys(document.tree)
    document.override(overrides)
    # YAML reads a section without keys as None. Such a section gets its defaults.
    tree = {key: value for key, value in document.tree.items() if value is not None}
    run = tree.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", Path(file).stem)

    return _validated(tree, document)


def with_values(config: Config, section: str, values: Mapping[str, Any]) -> Config:
    """Return a configuration with other values of a section's keys.

    Raises ConfigError.
    """
    document = Document("", "")
    document.override([f"{section}.{key}={json.dumps(value, default=str)}" for key, value in values.items()])
    former = getattr(config, section).model_dump(exclude_unset=True)
    return _validated({**dict(config), section: {**former, **document.tree.get(section, {})}}, document)


def _validated(tree: dict[str, Any], document: Document) -> Config:
    """Return the configuration of a tree. Raises ConfigError with every problem."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as invalid:
        _report(invalid.errors(include_url=False), document)
    # Only the document detects keys that are given twice, so a valid tree may still have problems.
    problems = document.problems()
    if problems:
        raise ConfigError(problems)
    return config


def _read_former_keys(tree: dict[str, Any]) -> None:
    _drop_removed_keys(tree)
    for former, name in _RENAMED.items():
        former_section, former_key = former.split(".")
        section, key = name.split(".")
        values = tree.get(former_section)
        if isinstance(values, dict) and former_key in values:
            tree.setdefault(section, {})[key] = values.pop(former_key)
            if not values:
                del tree[former_section]


def _drop_removed_keys(value: Any, section: str = "") -> None:
    if isinstance(value, list):
        for item in value:
            _drop_removed_keys(item, section)
    elif isinstance(value, dict):
        for key, part in list(value.items()):
            name = f"{section}{key}"
            if name in _REMOVED and part == _ALWAYS.get(name, part):
                del value[key]
            else:
                _drop_removed_keys(part, f"{name}.")


def dump_config(config: Config) -> str:
    """Return the configuration as YAML that loads back equal."""
    tree = config.model_dump(mode="json")
    # Unsorted, because the schema lists the keys in the order in which a reader needs them.
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=110)


def _report(errors: list[ErrorDetails], document: Document) -> None:
    """Record pydantic's errors as problems of the document."""
    # Pydantic reports a value that fits no member of a union once per member. The errors are merged into one problem.
    unmet: dict[Keys, list[ErrorDetails]] = {}
    for error in errors:
        path, section = _locate(error["loc"])
        match error["type"]:
            # YAML allows a number as a key, which pydantic reports as invalid.
            case "extra_forbidden" | "invalid_key":
                document.problem(path, f"unknown key{_instead(path) or suggestion(path[-1], section.model_fields)}")
            case "missing":
                document.problem(path, "missing")
            case "rule":
                # The rule belongs to a whole section, so the rule itself names the key.
                document.problem(tuple(error["ctx"]["key"].split(".")), error["msg"])
            case "union_tag_invalid":
                kind = error["input"]["kind"]
                known = QUOTED.findall(error["ctx"]["expected_tags"])
                instead = _instead((*path, f"kind={kind}")) or suggestion(kind, known)
                document.problem((*path, "kind"), f"unknown kind, found {_shortened(kind)}{instead}")
            case "union_tag_not_found":
                document.problem((*path, "kind"), "missing")
            case _:
                unmet.setdefault(path, []).append(error)
    for path, alternatives in unmet.items():
        document.problem(path, _unmet(alternatives))


def _unmet(alternatives: list[ErrorDetails]) -> str:
    """Return one sentence for a value that fits no alternative."""
    # Pydantic's messages name the limits. Their beginning is replaced, because a problem begins with its key.
    wanted: list[str] = []
    names: list[str] = []
    for error in alternatives:
        context = error.get("ctx", {})
        plain = error["msg"].removeprefix("Value error, ").replace("Input should", "must")
        wanted.append(IN_WORDS.get(context.get("pattern", ""), plain))
        names += QUOTED.findall(context.get("expected", ""))
    seen = alternatives[0]["input"]
    return f"{' or '.join(wanted)}, found {_shortened(seen)}{_nearest(seen, names)}"


def _locate(loc: tuple[int | str, ...]) -> tuple[Keys, type[Section]]:
    """Return the keys of a wrong value, and the section with the last key.

    Args:
        loc: pydantic's location of the error.
    """
    keys: list[str] = []
    section: type[Section] = Config
    members: list[type[Section]] = [Config]  # the sections that the next key may lie in; several for a union
    for part in loc:
        key = str(part)
        if key in UNION_MEMBERS:
            continue
        # The tag of a union is in pydantic's path, although it is the value of the key `kind` and no key itself.
        of_this_kind = [member for member in members if key in get_args(_annotation(member, "kind"))]
        if of_this_kind and len(members) > 1:
            members = of_this_kind
            continue
        keys.append(key)
        section = members[0]
        # An index of a list is no key of a section, so the sections of the list stay.
        members = kinds_in(_annotation(section, key)) or members
    return tuple(keys), section


def _annotation(section: type[Section], key: str) -> Any:
    field = section.model_fields.get(key)
    return field and field.annotation


def _shortened(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    if len(text) > 60:
        return f"{text[:57]}..."
    return text


def _instead(path: Keys) -> str:
    """Return what to use instead of an unknown key, "" if there is nothing."""
    known = _INSTEAD.get(".".join(key for key in path if not key.isdecimal()))
    if known is None:
        return ""
    return f"; {known}"


def suggestion(name: Any, valid: Iterable[str]) -> str:
    """Return the end of a message that names the nearest valid name, or all of them."""
    names = sorted(valid)
    return _nearest(name, names) or f"; valid: {', '.join(names)}"


def _nearest(name: Any, names: list[str]) -> str:
    close = difflib.get_close_matches(str(name), names, 1)
    if not close:
        return ""
    return f"; nearest is {close[0]}"
