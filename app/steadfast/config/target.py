"""Load the user's code by name: `target: "package.module:callable"`."""

import importlib
import inspect
import logging
import operator
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from steadfast.config.base import Target
from steadfast.errors import ConfigError, Problem

_log = logging.getLogger(__name__)

_PROGRAM = Path(__file__).parents[1]


def load_target(target: str, path: str = "target") -> Callable[..., Any]:
    """Return the callable that `target` names.

    Raises ConfigError at the key `path` if the callable cannot be loaded.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # The working directory comes first, as under `python -m`: some wheels install a stray `tests` package, which
        # would hide the user's package.
        sys.path.insert(0, here)
    name, _, attribute = target.partition(":")
    if name.startswith("<"):
        origin = f'"{target}" was an object of the program that called steadfast.fit()'
        raise _refusal(path, f"{origin}; only such a program can go on with it")
    try:
        module = _import(name)
    except (Exception, SystemExit) as error:  # the import runs the user's code, which may be a script that exits
        raise _refusal(path, f'"{target}": {_why_not_imported(error, name, Path(here))}') from error
    # Unlike `getattr`, an attrgetter follows dots, as in "module:Class.method".
    try:
        found = operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise _refusal(path, f'"{target}": {name} has no {attribute} ({error}){_hint(name, Path(here))}') from error
    if not callable(found):
        raise _refusal(path, f'"{target}" is a {type(found).__name__}, which cannot be called')
    return found  # type: ignore[no-any-return]


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Until version 0.2 this package was called app. Runs and configurations of that time name its modules.
        if not name.startswith("app.") or not f"{name}.".startswith(f"{error.name}."):
            raise
        renamed = f"steadfast.{name.removeprefix('app.')}"
        try:
            module = importlib.import_module(renamed)
        except ModuleNotFoundError:
            raise error from None
        _log.warning("%s is called %s since version 0.3: change the configuration", name, renamed)
        return module


def load_section(section: Target, path: str) -> Callable[..., Any]:
    """Return the callable that the section at the key `path` names or holds.

    Raises ConfigError if the callable cannot be loaded.
    """
    if section.given is not None:
        return section.given
    return load_target(section.target, f"{path}.target")


def build_target(section: Target, path: str, **values: Any) -> Any:
    """Call the target of the section at the key `path` and return the result.

    The arguments are `values` and the section's `args`. Raises ConfigError if the target cannot be loaded or does not
    accept the arguments.
    """
    return bind_target(section, path, **values)()


def bind_target(section: Target, path: str, **values: Any) -> Callable[[], Any]:
    """Return the call that `build_target` makes, without calling the target.

    Raises ConfigError as `build_target` does.
    """
    builder = load_section(section, path)
    args = values | section.args
    # The arguments are bound before the call, so that a TypeError inside the user's code is not reported as wrong
    # arguments.
    try:
        inspect.signature(builder).bind(**args)
    except TypeError as error:
        raise _refusal(f"{path}.args", f'"{section.target}" does not take {args}: {error}') from error
    except ValueError:
        pass  # some builtins have no signature
    return partial(builder, **args)


def build_function(section: Target, path: str) -> Any:
    """Return the function that a target names or builds.

    A class, or a target with `args`, is called with `args`, and its result is the function.
    """
    found = load_section(section, path)
    if section.args or isinstance(found, type):
        return build_target(section, path)
    return found


def _why_not_imported(error: BaseException, name: str, here: Path) -> str:
    """Return why the import of the module `name` failed."""
    missing = error.name if isinstance(error, ImportError) else None
    # Only a part of the target's own path means that the target is missing. Otherwise its module was found, and an
    # import within the module has failed.
    if isinstance(error, ModuleNotFoundError) and missing and f"{name}.".startswith(f"{missing}."):
        return f"no module {missing} in {here} or among the installed packages{_hint(missing, here)}"
    what = f"{_place_of(error, here)}{type(error).__name__}: {error}{_hint(missing or '', here)}"
    if not isinstance(error, ImportError | SyntaxError):
        what += (
            f'. An import runs the whole file: a script\'s training belongs under if __name__ == "__main__" in {name}'
        )
    return what


def _place_of(error: BaseException, here: Path) -> str:
    """Return the error's innermost line in `here` as "file:line: ".

    Returns "" if no line of the traceback is in `here`.
    """
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # A file that cannot be parsed has no frame in the traceback.
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
    for file, line in reversed(places):
        path = Path(file)
        # A virtual environment may be inside the working directory, and its files are not the user's.
        is_users = "site-packages" not in path.parts and not path.is_relative_to(_PROGRAM)
        if is_users and path.is_relative_to(here):
            return f"{path.relative_to(here)}:{line}: "
    return ""


def _hint(module: str, here: Path) -> str:
    """Return advice if this program's package hides the user's."""
    own = _PROGRAM.name
    has_the_same = (here / own).is_dir() or (here / f"{own}.py").is_file()
    if module.partition(".")[0] != own or not has_the_same or here == _PROGRAM.parent:
        return ""
    return (
        f". Steadfast's own package is called {own} too, and hides the one in {here}: "
        "rename yours, or move its modules below a package of another name"
    )


def _refusal(path: str, what: str) -> ConfigError:
    return ConfigError([Problem("", path, what)])
