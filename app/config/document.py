"""A configuration as written: YAML and KEY=VALUE overrides, with the place of every key."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from app.errors import ConfigError, Problem

Keys = tuple[str, ...]
OVERRIDE = 10**9  # as a line number: overrides come after the last line of any file


class Loader(yaml.SafeLoader):
    pass


class Dumper(yaml.SafeDumper):
    pass


# YAML 1.1 takes 1e-3 for text, because it has no point; nobody who writes a learning rate means that.
for _resolver in (Loader, Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$"), list("-+0123456789")
    )


class Document:
    """The tree that was written, the line of each key, and what is wrong with it so far."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._lines: dict[Keys, int] = {(): 1}
        self._found: list[tuple[int, Problem]] = []
        loader = Loader(text)
        try:
            root = loader.get_single_node()
            self.tree: Any = loader.construct_document(root) if root else {}
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            what = f"not valid YAML: {getattr(error, 'problem', error)}"
            raise ConfigError([Problem(f"{file}:{mark.line + 1}" if mark else file, "", what)]) from None
        if root:
            self._note_lines(root, ())
        if not isinstance(self.tree, dict):
            self.problem((), "must be a mapping of sections")
            self.tree = {}

    def _note_lines(self, node: yaml.Node, path: Keys) -> None:
        """YAML itself lets a key that is given twice pass; here it is a problem."""
        first: dict[str, int] = {}
        for name, key, value in _children(node):
            self._lines[*path, name] = line = key.start_mark.line + 1
            if first.setdefault(name, line) != line:
                self.problem((*path, name), f"given twice, first on line {first[name]}")
            self._note_lines(value, (*path, name))

    def override(self, overrides: Sequence[str]) -> None:
        """Set KEY=VALUE for each; VALUE is read as YAML, or as text where it is not YAML (such as *.txt)."""
        settings = [text.partition("=") for text in overrides]
        # Another kind first: it drops what the file said of the former, but nothing that an override says.
        for key, equals, text in sorted(settings, key=lambda setting: not setting[0].endswith((".kind", ".target"))):
            *parents, name = path = tuple(key.split("."))
            section = self.tree
            for depth, part in enumerate(parents, 1):
                if not isinstance(section.get(part), dict):
                    section[part] = {}
                    self._lines[path[:depth]] = OVERRIDE
                section = section[part]
            self._lines[path] = OVERRIDE
            if equals:
                _drop_former(section, path, _value(text))
                section[name] = _value(text)
            else:
                self.problem(path, "must be given as section.key=value")

    def problem(self, path: Keys, what: str) -> None:
        """Record what is wrong with `path`, at its line, or at its section's if nobody wrote it."""
        line = next(self._lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self._lines)
        where = "override" if line == OVERRIDE else f"{self._file}:{line}"
        self._found.append((line, Problem(where, ".".join(path), what)))

    def problems(self) -> list[Problem]:
        """Every problem, from the top of the file to the overrides."""
        return [problem for _, problem in sorted(self._found, key=lambda found: found[0])]


def _drop_former(section: dict[Any, Any], path: Keys, value: Any) -> None:
    """Another kind has other keys, and of two lengths of the run the override's holds."""
    former = section.get("kind", "target" if "target" in section else None)
    if path[-1] in ("kind", "target") and former not in (None, value if path[-1] == "kind" else "target"):
        section.clear()
    if path in (("run", "steps"), ("run", "epochs")) and value is not None:
        section.pop("steps", None)
        section.pop("epochs", None)


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
