"""The user's own code, by name: `target: "package.module:callable"` and its `args`."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NoReturn

from app.errors import ConfigError, Problem


def load_target(target: str, path: str = "target") -> Callable[..., Any]:
    """The callable that `target` names; ConfigError (at config key `path`) says which half of it failed."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        _refuse(path, f'"{target}" is not of the form "package.module:callable"')
    found: Any = _import(module_name, path, target)
    for name in attribute.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, [each for each in dir(found) if each[0] != "_"], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            _refuse(path, f'"{target}": {module_name} has no {attribute}{hint}')
        found = getattr(found, name)
    if not callable(found):
        _refuse(path, f'"{target}" is a {type(found).__name__}, which cannot be called')
    return found  # type: ignore[no-any-return]


def build_target(target: str, args: Mapping[str, Any], path: str) -> Any:
    """What `target` returns for `args`. Arguments that do not fit are the config's fault and say so."""
    builder = load_target(target, f"{path}.target")
    try:
        inspect.signature(builder).bind(**args)
    except TypeError as error:
        _refuse(f"{path}.args", f'"{target}" does not take {dict(args)}: {error}')
    except ValueError:  # builtins may have no signature; the call itself is then the check
        pass
    return builder(**args)


def _import(name: str, path: str, target: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # first, as under `python -m`: some wheels install a stray `tests` package
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            _refuse(path, f'"{target}": importing {name} failed: {error}', error)
        _refuse(path, f'"{target}": no module {error.name} in {here} or among the installed packages', error)
    except Exception as error:
        _refuse(path, f'"{target}": importing {name} failed: {type(error).__name__}: {error}', error)


def _refuse(path: str, what: str, cause: Exception | None = None) -> NoReturn:
    raise ConfigError([Problem("", path, what)]) from cause
