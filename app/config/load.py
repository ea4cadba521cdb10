"""FILE and KEY=VALUE -> Config. Every problem at once: where, what, the value seen, the nearest name."""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.config.base import BALANCES, Section
from app.config.document import Document, Dumper, Keys
from app.config.schema import Config
from app.errors import ConfigError, Problem

CONFIGS = Path(__file__).parents[2] / "configs"
UNION_MEMBERS = ("literal['auto']", "constrained-int", *BALANCES)  # which pydantic adds to the keys of an error


def load_config(file: str, overrides: Sequence[str] = ()) -> Config:
    """Read FILE as given, else in configs/, then apply the overrides. Raises ConfigError."""
    path = next((path for path in (Path(file), CONFIGS / file) if path.is_file()), None)
    if path is None:
        near = _nearest(Path(file).name, (known.name for known in CONFIGS.glob("*.yaml")))
        raise ConfigError([Problem(file, "", f"no such file, here or in configs/{near}")])
    return parse_config(path.read_text(), file if path == Path(file) else f"configs/{file}", overrides)


def parse_config(text: str, file: str = "config.yaml", overrides: Sequence[str] = ()) -> Config:
    """The configuration that `text` holds. `file` names it in errors, and its stem names the run."""
    document = Document(text, file)
    document.override(overrides)
    tree = {key: value for key, value in document.tree.items() if value is not None}  # empty: left to its defaults
    if isinstance(run := tree.setdefault("run", {}), dict):
        run.setdefault("name", Path(file).stem)
    try:
        config = Config.model_validate(tree)
    except ValidationError as invalid:
        _explain(invalid.errors(include_url=False), document)
    if problems := document.problems():
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> str:
    """YAML that loads back equal."""
    tree = config.model_dump(mode="json")
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=110)


def _explain(errors: list[ErrorDetails], document: Document) -> None:
    """Add to pydantic's errors the value seen and the nearest name."""
    unmet: dict[Keys, list[ErrorDetails]] = {}
    for error in errors:
        path, section = _locate(error["loc"])
        match error["type"]:
            case "extra_forbidden" | "invalid_key":
                document.problem(path, f"unknown key{_nearest(path[-1], section.model_fields)}")
            case "missing":
                document.problem(path, "missing")
            case "at_most":
                document.problem((*path, error["ctx"]["key"]), error["msg"])
            case "union_tag_invalid":
                kind, known = error["input"]["kind"], _quoted(error["ctx"]["expected_tags"])
                document.problem((*path, "kind"), f"unknown kind, found {_shown(kind)}{_nearest(kind, known)}")
            case "union_tag_not_found":
                document.problem((*path, "kind"), "missing")
            case _:
                unmet.setdefault(path, []).append(error)
    for path, alternatives in unmet.items():
        document.problem(path, _unmet(alternatives))


def _unmet(alternatives: list[ErrorDetails]) -> str:
    """One sentence for a value that is none of what its field takes, such as "auto" or a number."""
    wanted = [error["msg"].removeprefix("Value error, ").replace("Input should", "must") for error in alternatives]
    names = [name for error in alternatives for name in _quoted(error.get("ctx", {}).get("expected", ""))]
    seen = alternatives[0]["input"]
    close = difflib.get_close_matches(str(seen), names, 1)
    return f"{' or '.join(wanted)}, found {_shown(seen)}{f'; nearest is {close[0]}' if close else ''}"


def _locate(loc: tuple[int | str, ...]) -> tuple[Keys, type[Section]]:
    """The keys that an error is about, without pydantic's names of union members, and the section they lie in."""
    keys: list[str] = []
    section, members = Config, [Config]
    for key in (str(key) for key in loc if key not in UNION_MEMBERS):
        kinds = [member for member in members if len(members) > 1 and key in get_args(_annotation(member, "kind"))]
        if kinds:
            members = kinds
            continue
        keys.append(key)
        section = members[0]
        members = _sections(_annotation(section, key)) or members
    return tuple(keys), section


def _annotation(section: type[Section], key: str) -> Any:
    return section.model_fields[key].annotation if key in section.model_fields else None


def _sections(annotation: Any) -> list[type[Any]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _quoted(names: str) -> list[str]:
    return re.findall(r"'(.*?)'", names)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nearest(name: Any, valid: Iterable[str]) -> str:
    names = sorted(valid)
    close = difflib.get_close_matches(str(name), names, 1)
    return f"; nearest is {close[0]}" if close else f"; valid: {', '.join(names)}"
