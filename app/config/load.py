"""FILE and KEY=VALUE -> Config. Every problem at once: where, what, the value seen, the nearest name."""

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.config.base import Section, kind_of, sections_in
from app.config.document import Document, Dumper, Keys
from app.config.schema import Config
from app.errors import ConfigError, Problem

CONFIGS = Path(__file__).parents[2] / "configs"
Members = tuple[type[Section], ...]

# What was wanted, by pydantic's error type or by its first word.
# fmt: off
WANTED = {
    "int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false",
    "string": "text", "model": "a mapping", "dict": "a mapping", "list": "a list", "tuple": "a list",
    "greater_than": "above {gt}", "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}", "less_than_equal": "at most {le}", "too_long": "at most {max_length} items",
    "literal_error": "{expected}", "value_error": "{error}", "string_too_short": "some text",
    "string_pattern_mismatch": "text that matches {pattern}",
}
# fmt: on


def load_config(file: str, overrides: Sequence[str] = ()) -> Config:
    """Read FILE as given, else in configs/, then apply the overrides. Raises ConfigError."""
    path = next((path for path in (Path(file), CONFIGS / file) if path.exists()), None)
    if path is None:
        near = _nearest(Path(file).name, (known.name for known in CONFIGS.glob("*.yaml")))
        raise ConfigError([Problem(file, "", f"no such file, here or in configs/{near}")])
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError([Problem(file, "", f"cannot be read as text: {error}")]) from None
    return parse_config(text, file if path == Path(file) else f"configs/{file}", overrides)


def parse_config(text: str, file: str = "config.yaml", overrides: Sequence[str] = ()) -> Config:
    """The configuration that `text` holds. `file` names it in errors, and its stem names the run."""
    document = Document(text, file)
    document.override(overrides)
    # An empty section is left to its defaults; an empty `trackers:` could also mean none, so it is refused.
    tree = {key: value for key, value in document.tree.items() if value is not None or key == "trackers"}
    run = tree.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", Path(file).stem).lstrip(".-") or "run")
    try:
        config = Config.model_validate(tree)
    except ValidationError as invalid:
        _explain(invalid.errors(include_url=False), tree, document)
    if problems := document.problems():
        raise ConfigError(problems)
    return config


def dump_config(config: Config) -> str:
    """YAML that loads back equal."""
    tree = config.model_dump(mode="json")
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, default_flow_style=None, width=110)


def _explain(errors: list[ErrorDetails], tree: dict[str, Any], document: Document) -> None:
    """Put pydantic's errors into our words; those of a plain union ("auto" or a number) become one."""
    unmet: dict[Keys, list[ErrorDetails]] = {}
    for error in errors:
        path, members = _locate(error["loc"], tree)
        match error["type"]:
            case "rules":
                for key, what in error["ctx"]["broken"]:
                    document.problem((*path, *key.split(".")), what)
            case "extra_forbidden" | "invalid_key":
                document.problem(path, f"unknown key{_nearest_key(path, members[0])}")
            case "missing":
                field = members[0].model_fields.get(path[-1])
                about = f": {field.description}" if field and field.description else ""
                document.problem(path, f"missing{about}", beside="kind")
            case "unknown_kind":
                kind, known = error["input"]["kind"], filter(None, map(kind_of, members))
                document.problem((*path, "kind"), f"unknown kind, found {_shown(kind)}{_nearest(kind, known)}")
            case "default_factory_not_called":
                pass  # run.steps, waiting for a field that has its own error
            case _:
                unmet.setdefault(path, []).append(error)
    for path, alternatives in unmet.items():
        document.problem(path, _unmet(alternatives))


def _locate(loc: Sequence[str | int], tree: Any) -> tuple[Keys, Members]:
    """The keys that an error is about, without pydantic's names of union members, and where they lie."""
    path: Keys = ()
    members: Members = (Config,)
    for part in loc:
        chosen = tuple(member for member in members if member.__name__ == part)
        if chosen and len(members) > 1:
            members = chosen
            continue
        if isinstance(tree, list) and isinstance(part, int):
            tree = tree[part] if part < len(tree) else None
        elif isinstance(tree, dict) and (part in tree or part in members[0].model_fields):
            field = members[0].model_fields.get(str(part))
            members = (sections_in(field.annotation) if field else ()) or members
            tree = tree.get(part)
        else:
            break
        path = (*path, str(part))
    return path, members


def _unmet(alternatives: list[ErrorDetails]) -> str:
    """One sentence for a value that is none of what its field takes."""
    wanted: list[str] = []
    literals: list[str] = []
    for error in alternatives:
        template = WANTED.get(error["type"]) or WANTED.get(error["type"].split("_")[0])
        wanted.append(template.format(**error.get("ctx", {})).replace("'", "") if template else error["msg"])
        if error["type"] == "literal_error":
            literals += re.findall(r"'(.*?)'", error["ctx"]["expected"])
    seen = alternatives[0]["input"]
    close = difflib.get_close_matches(str(seen), literals, 1)
    return f"must be {' or '.join(wanted)}, found {_shown(seen)}{_did_you_mean(close)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _did_you_mean(close: Sequence[str]) -> str:
    return f"; nearest is {close[0]}" if close else ""


def _nearest(name: Any, valid: Iterable[str]) -> str:
    names = sorted(valid)
    return _did_you_mean(difflib.get_close_matches(str(name), names, 1)) or f"; valid: {', '.join(names)}"


def _nearest_key(path: Keys, section: type[Section]) -> str:
    """The nearest key of the section, else of any other (`lr` is optimizer.lr), else all of the section's."""
    here = list(section.model_fields)
    elsewhere = {
        field: f"{name}.{field}"
        for name, place in reversed(Config.model_fields.items())
        for member in sections_in(place.annotation)
        for field in member.model_fields
        if name != path[0] and field not in ("kind", "target", "args")
    }
    close = difflib.get_close_matches(path[-1], here, 1)
    far = [elsewhere[field] for field in difflib.get_close_matches(path[-1], elsewhere, 1)]
    return _did_you_mean(close or far) or f"; valid: {', '.join(here)}"
