"""A configuration as written: YAML and KEY=VALUE overrides, with the place of every key."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import yaml

from app.config.base import choose, sections_in
from app.config.schema import Config
from app.errors import ConfigError, Problem

Keys = tuple[str, ...]


class Loader(yaml.SafeLoader):
    pass


class Dumper(yaml.SafeDumper):
    pass


# YAML 1.1 takes 1e-3 for text, because it has no point; nobody who writes a learning rate means that.
for _resolver in (Loader, Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$"), list("-+0123456789")
    )


class Mark(NamedTuple):
    line: int  # orders the problems; overrides come after the last line of the file
    where: str


class Document:
    """The tree that was written, where each key stands, and what is wrong with it so far."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.num_lines = text.count("\n") + 1
        self.tree: dict[Any, Any] = {}
        self.marks: dict[Keys, Mark] = {(): Mark(1, f"{file}:1")}
        self.found: list[tuple[int, Problem]] = []
        try:
            self._read(text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            tab = "; indent with spaces, not tabs" if r"\t" in (error.problem or "") else ""
            where = f"{file}:{mark.line + 1}" if mark else file
            raise ConfigError([Problem(where, "", f"not valid YAML: {error.problem}{tab}")]) from None
        except (yaml.YAMLError, RecursionError) as error:  # an unprintable character; an anchor inside itself
            raise ConfigError([Problem(file, "", f"not valid YAML: {error}")]) from None

    def _read(self, text: str) -> None:
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            return
        self._mark(root, ())
        tree = loader.construct_object(root, deep=True)
        if isinstance(tree, dict):
            self.tree = tree
        else:
            self.problem((), f"must be a mapping of sections, found {str(tree)[:60]!r}")

    def _mark(self, node: yaml.Node, path: Keys) -> None:
        """Note the line of every key and item; YAML itself lets a key that is given twice pass."""
        first: dict[str, int] = {}
        for name, key, value in _children(node):
            line = key.start_mark.line + 1
            self.marks[*path, name] = Mark(line, f"{self.file}:{line}")
            if first.setdefault(name, line) != line:
                self.problem((*path, name), f"given twice, first on line {first[name]}")
            self._mark(value, (*path, name))

    def override(self, overrides: Sequence[str]) -> None:
        """Set KEY=VALUE for each; VALUE is read as YAML, or as text where it is not YAML (such as *.txt)."""
        settings: list[tuple[Keys, Any]] = []
        for index, text in enumerate(overrides, 1):
            key, equals, value = text.partition("=")
            path = tuple(key.split("."))
            # What the file said below this key is gone, and so are its lines.
            self.marks = {old: mark for old, mark in self.marks.items() if old[: len(path)] != path}
            self.marks[path] = Mark(self.num_lines + index, f"override {key}")
            if equals and all(path):
                settings.append((path, _value(value)))
            else:
                self.problem(path, "must look like section.key=value")
        # Before any is set, so that the order in which overrides are given does not matter.
        for path, value in settings:
            self._make_room(path, value)
        for path, value in settings:
            self._set(path, value)

    def _make_room(self, path: Keys, value: Any) -> None:
        """Drop from the file what an override replaces: a former kind's keys, the run's other length."""
        section = self.tree.get(path[0])
        if len(path) != 2 or not isinstance(section, dict):
            return
        gone: set[str] = set()
        if path in (("run", "steps"), ("run", "epochs")) and value is not None:
            gone = {"steps", "epochs"} - {path[1]}
        elif path[0] in Config.model_fields and path[1] in ("kind", "target"):
            members = sections_in(Config.model_fields[path[0]].annotation)
            old, new = choose(members, section), choose(members, {path[1]: value})
            gone = set(old.model_fields) - set(new.model_fields) if old and new else gone
        for key in gone & set(section):
            del section[key]

    def _set(self, path: Keys, value: Any) -> None:
        parent = self.tree
        for depth, part in enumerate(path[:-1], 1):
            if parent.get(part) is None:
                parent[part] = {}
            parent = parent[part]
            if not isinstance(parent, dict):
                self.problem(path, f"{'.'.join(path[:depth])} has no keys; set the whole of it")
                return
        parent[path[-1]] = value

    def problem(self, path: Keys, what: str, beside: str = "") -> None:
        """Record what is wrong with `path`.

        If nobody wrote it, it stands where its sibling `beside` or its parent does.
        """
        places = [path, (*path[:-1], beside), *(path[:end] for end in range(len(path) - 1, -1, -1)), ()]
        line, where = next(self.marks[place] for place in places if place in self.marks)
        key = ".".join(path)
        self.found.append((line, Problem(where, "" if where == f"override {key}" else key, what)))

    def problems(self) -> list[Problem]:
        """Every problem, from the top of the file to the last override."""
        return [problem for _, problem in sorted(self.found, key=lambda found: found[0])]


def _children(node: yaml.Node) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((str(key.value), key, value) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from ((str(index), item, item) for index, item in enumerate(node.value))


def _value(text: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        return text
