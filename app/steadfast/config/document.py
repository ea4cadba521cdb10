"""Read YAML and KEY=VALUE overrides, with the line of every key."""

import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import yaml

from steadfast.errors import ConfigError, Problem

Keys = tuple[str, ...]
# Line number of overrides. Problems are reported in the order of lines, and overrides follow the last line of any file.
OVERRIDE = 10**9
_MOST_BYTES = 2**21  # PyYAML needs about a second for each megabyte
_DEEPEST = 50
_MOST_ALIASED = 10_000  # values that aliases expand to: a few lines of nested anchors can expand to any number
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)|[-+]?0[xb][0-9a-fA-F_]+")


# The loader and dumper are subclasses, because a resolver added to PyYAML's own classes would also change YAML for the
# user's code in this process.
class Loader(yaml.SafeLoader):
    """YAML loader with bounded time and strict numbers.

    The loader limits depth and aliases, so that an untrusted file cannot stall the command. Text that only YAML 1.1
    reads as a number stays text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._num_aliased = 0
        self._sizes: dict[int, int] = {}  # values in each node that is complete, by id

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        # PyYAML composes nodes recursively, so a file that is nested deeply would exhaust Python's stack.
        if self._depth > _DEEPEST:
            _refuse(f"nested more than {_DEEPEST} deep", event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        # The tree holds all nodes, so the id of a node stays its own.
        if not isinstance(event, yaml.AliasEvent):
            self._sizes[id(node)] = 1 + sum(self._sizes[id(child)] for _, _, child in _children(node))
        elif id(node) not in self._sizes:
            _refuse("an alias within what it names", event)
        else:
            self._num_aliased += self._sizes[id(node)]
            if self._num_aliased > _MOST_ALIASED:
                _refuse(f"aliases that stand for more than {_MOST_ALIASED} values", event)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, LookupError, TypeError, ValueError):  # PyYAML's constructors do not validate their text
            _refuse(f"not a valid {node.tag.rpartition(':')[2]}", node)

    def construct_date(self, node: yaml.ScalarNode) -> str:
        """Return the text of a date."""
        # No key takes a date, and users name runs after the day.
        return str(self.construct_scalar(node))

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Return an int or float, or text for an ambiguous number."""
        text = str(self.construct_scalar(node))
        # YAML 1.1 reads 1:30 in base 60 and 010 in base 8, so both stay text.
        is_int = node.tag.endswith(":int")
        if ":" in text or (is_int and not _DECIMAL.fullmatch(text)):
            return text
        try:
            if is_int:
                return self.construct_yaml_int(node)
            return self.construct_yaml_float(node)
        except (ValueError, OverflowError):
            _refuse(f"a number of {len(text)} characters", node)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_number)
Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_number)
Loader.add_constructor("tag:yaml.org,2002:timestamp", Loader.construct_date)


class Dumper(yaml.SafeDumper):
    pass


# YAML 1.1 reads 1e-3 as text, because the number has no point, but a user who writes 1e-3 means a number. The dumper
# needs the same resolver; otherwise the dumper would write the text "1e-3" without quotes.
for _resolver in (Loader, Dumper):
    _resolver.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$"), list("-+0123456789")
    )


def read_text(path: Path, file: str) -> str:
    """Read a configuration file as text.

    `file` names the file in errors. Raises ConfigError if the file is too long or not UTF-8.
    """
    # One byte more than the limit shows that a file is too long, without reading all of a huge file.
    with path.open("rb") as stream:
        return decoded(stream.read(_MOST_BYTES + 1), file)


def decoded(data: bytes, file: str) -> str:
    """Return the text of a configuration.

    Raises ConfigError if `data` is too long or not UTF-8.
    """
    if len(data) > _MOST_BYTES:
        what = f"more than {_MOST_BYTES} bytes, the most that a configuration may have: is it another file?"
        raise ConfigError([Problem(file, "", what)])
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"not UTF-8 text: byte 0x{data[error.start]:02x}. Save the file as UTF-8"
        raise ConfigError([Problem(f"{file}:{line}", "", what)]) from None


class Document:
    """Configuration as a plain tree, with key lines and problems."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        self._lines: dict[Keys, int] = {(): 1}
        self._found: list[tuple[int, Problem]] = []

        self.tree: Any = {}
        try:
            self.tree = self._read(text, ()) or {}
        except yaml.YAMLError as error:
            raise ConfigError([_syntax_problem(error, file, text)]) from None
        if not isinstance(self.tree, dict):
            self.problem((), "must be a mapping of sections")
            self.tree = {}

    def override(self, overrides: Sequence[str]) -> None:
        """Set each KEY=VALUE.

        VALUE is read as YAML, or as text if VALUE is not valid YAML (such as *.txt).
        """
        for override in _in_order(overrides):
            key, equals, text = override.partition("=")
            path = tuple(key.split("."))
            section = self._section_to_override(path[:-1])
            self._lines[path] = OVERRIDE
            if equals:
                value = self._value(text, path)
                _drop_former(section, path, value)
                section[path[-1]] = value
            else:
                self.problem(path, "must be given as section.key=value")

    def problem(self, path: Keys, what: str) -> None:
        """Record a problem of a key, at the key's line."""
        # A key that the configuration does not contain has no line, so the line of its section is taken.
        written = path
        while written not in self._lines:
            written = written[:-1]
        line = self._lines[written]
        where = "override" if line == OVERRIDE else f"{self._file}:{line}"
        self._found.append((line, Problem(where, ".".join(path), what)))

    def problems(self) -> list[Problem]:
        """Return every problem, from the top of the file to the overrides."""
        # The sort is stable, so problems of one line stay in the order in which they were found.
        return [problem for _, problem in sorted(self._found, key=itemgetter(0))]

    def _read(self, text: str, path: Keys, line: int | None = None) -> Any:
        """Return the tree that `text` holds and record its lines.

        `path` is the place of the tree in the document. With `line` all keys are recorded on that line.
        """
        # Only YAML's nodes hold line numbers; the tree built from the nodes does not.
        loader = Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        # The lines are recorded before construction, because construction mixes merged keys with the keys that override
        # the merged ones.
        self._note_lines(root, path, line)
        return loader.construct_document(root)

    def _value(self, text: str, path: Keys) -> Any:
        try:
            return self._read(text, path, OVERRIDE)
        except yaml.YAMLError:
            return text

    def _note_lines(self, node: yaml.Node, path: Keys, all_on: int | None) -> None:
        first_lines: dict[str, int] = {}
        for name, key, value in _children(node):
            line = all_on or key.start_mark.line + 1
            self._lines[*path, name] = line
            # YAML silently uses the last of two equal keys, so the user would search at the first key for a long time.
            if name in first_lines:
                what = "given twice"
                if first_lines[name] != line:
                    what = f"given twice, first on line {first_lines[name]}"
                self.problem((*path, name), what)
            first_lines.setdefault(name, line)
            self._note_lines(value, (*path, name), all_on)

    def _section_to_override(self, path: Keys) -> dict[Any, Any]:
        section: dict[Any, Any] = self.tree
        # A value in the place of a section is replaced, as an override has precedence over the file.
        for depth, name in enumerate(path, 1):
            if not isinstance(section.get(name), dict):
                section[name] = {}
                self._lines[path[:depth]] = OVERRIDE
            section = section[name]
        return section


def _syntax_problem(error: yaml.YAMLError, file: str, text: str) -> Problem:
    place = file
    mark = getattr(error, "problem_mark", None)
    if mark:
        place = f"{file}:{mark.line + 1}"
    what = getattr(error, "problem", None) or str(error)
    # This error comes from PyYAML's reader, which knows a position and no line.
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        place = f"{file}:{line}"
        what = f"a character that no text has, {error.character!a}"
    return Problem(place, "", f"not valid YAML: {what}")


def _refuse(what: str, place: Any) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=what, problem_mark=place.start_mark)


def _in_order(overrides: Sequence[str]) -> list[str]:
    """Return the overrides in an order in which none removes what another one sets.

    A whole section replaces the keys in it that were given before it.
    """
    keys = [override.partition("=")[0] for override in overrides]
    kept = []
    for number, override in enumerate(overrides):
        if not any(keys[number].startswith(f"{later}.") for later in keys[number + 1 :]):
            kept.append(override)

    def rank(override: str) -> tuple[int, bool]:
        key = override.partition("=")[0]
        # A whole section comes before the keys in it. A new kind removes the file's keys of the former kind.
        return key.count("."), not key.endswith((".kind", ".target"))

    return sorted(kept, key=rank)


def _drop_former(section: dict[Any, Any], path: Keys, value: Any) -> None:
    """Remove keys of a section that contradict `path` = `value`.

    A new kind or target removes all keys of the former kind. A length of the run removes the former length.
    """
    name = path[-1]
    if name in ("kind", "target"):
        # The new kind would not know the keys of the former kind. A section with a target may omit its kind.
        implied = "target" if "target" in section else None
        former = section.get("kind", implied)
        new = value if name == "kind" else "target"
        if former is not None and former != new:
            section.clear()

    # A run has one length, in steps or in epochs. The length in the override replaces the length in the file.
    if path in (("run", "steps"), ("run", "epochs")) and value is not None:
        section.pop("steps", None)
        section.pop("epochs", None)


def _children(node: yaml.Node) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """Yield name, key node and value node of each child.

    An item of a sequence serves as its own key node.
    """
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield str(key.value), key, value
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield str(index), item, item
