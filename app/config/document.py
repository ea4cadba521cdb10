"""A configuration as written: YAML and KEY=VALUE overrides, with the line of every key."""

import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import yaml

from app.errors import ConfigError, Problem

Keys = tuple[str, ...]
# As a line number: problems are told in the order of lines, and overrides come after the last line of any file.
OVERRIDE = 10**9


# Classes of our own: a resolver added to PyYAML's would change YAML for the user's code in this process as well.
class Loader(yaml.SafeLoader):
    pass


class Dumper(yaml.SafeDumper):
    pass


# YAML 1.1 takes 1e-3 for text, because it has no point; nobody who writes a learning rate means that. The dumper has to
# know as well, or it would write the text "1e-3" without quotes.
for _resolver in (Loader, Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$"), list("-+0123456789")
    )


class Document:
    """A configuration as a plain tree, with the line of each key and the problems found so far."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._lines: dict[Keys, int] = {(): 1}
        self._found: list[tuple[int, Problem]] = []

        self.tree: Any = {}
        # Lines are known to YAML's nodes only, not to the tree that is built from them.
        loader = Loader(text)
        try:
            root = loader.get_single_node()
            if root:
                self.tree = loader.construct_document(root)
        except yaml.YAMLError as error:
            raise ConfigError([_syntax_problem(error, file)]) from None

        if root:
            self._note_lines(root, ())
        if not isinstance(self.tree, dict):
            self.problem((), "must be a mapping of sections")
            self.tree = {}

    def override(self, overrides: Sequence[str]) -> None:
        """Set each KEY=VALUE. VALUE is read as YAML, or as text where it is not YAML (such as *.txt)."""
        # Kinds first: a new kind drops what the file said of the former, but must not drop what another override says.
        for override in sorted(overrides, key=lambda each: not each.partition("=")[0].endswith((".kind", ".target"))):
            key, equals, text = override.partition("=")
            path = tuple(key.split("."))
            section = self._section_to_override(path[:-1])
            self._lines[path] = OVERRIDE
            if equals:
                value = _value(text)
                _drop_former(section, path, value)
                section[path[-1]] = value
            else:
                self.problem(path, "must be given as section.key=value")

    def problem(self, path: Keys, what: str) -> None:
        """Record what is wrong with `path`, at its line, or at its section's line if nobody wrote `path` itself."""
        written = path
        while written not in self._lines:
            written = written[:-1]
        line = self._lines[written]
        where = "override" if line == OVERRIDE else f"{self._file}:{line}"
        self._found.append((line, Problem(where, ".".join(path), what)))

    def problems(self) -> list[Problem]:
        """Return every problem, from the top of the file to the overrides."""
        return [problem for _, problem in sorted(self._found, key=itemgetter(0))]

    def _note_lines(self, node: yaml.Node, path: Keys) -> None:
        first_lines: dict[str, int] = {}
        for name, key, value in _children(node):
            line = key.start_mark.line + 1
            self._lines[*path, name] = line
            # YAML takes the last of two equal keys without a word, and the first would be looked at for long.
            first_line = first_lines.setdefault(name, line)
            if first_line != line:
                self.problem((*path, name), f"given twice, first on line {first_line}")
            self._note_lines(value, (*path, name))

    def _section_to_override(self, path: Keys) -> dict[Any, Any]:
        section: dict[Any, Any] = self.tree
        for depth, name in enumerate(path, 1):
            if not isinstance(section.get(name), dict):
                section[name] = {}
                self._lines[path[:depth]] = OVERRIDE
            section = section[name]
        return section


def _syntax_problem(error: yaml.YAMLError, file: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"{file}:{mark.line + 1}" if mark else file
    return Problem(where, "", f"not valid YAML: {getattr(error, 'problem', error)}")


def _drop_former(section: dict[Any, Any], path: Keys, value: Any) -> None:
    """Remove from `section` what setting `path` to `value` puts out of force."""
    name = path[-1]
    if name in ("kind", "target"):
        # Keys of another kind would be unknown to this one. A target may stand without its kind.
        former = section.get("kind", "target" if "target" in section else None)
        new = value if name == "kind" else "target"
        if former is not None and former != new:
            section.clear()

    # A run has one length, in steps or in epochs: that of the override, not that of the file.
    if path in (("run", "steps"), ("run", "epochs")) and value is not None:
        section.pop("steps", None)
        section.pop("epochs", None)


def _children(node: yaml.Node) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield name, key node and value node of each child; an item of a sequence is its own key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield str(key.value), key, value
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield str(index), item, item


def _value(text: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        return text
