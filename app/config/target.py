"""The user's own code, by name: `target: "package.module:callable"` and its `args`."""

import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from app.errors import ConfigError, Problem


def load_target(target: str, path: str = "target") -> Callable[..., Any]:
    """Return the callable that `target` names. Raises ConfigError at the key `path` if there is none."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # First, as under `python -m`: some wheels install a stray `tests` package, which would hide the user's.
        sys.path.insert(0, here)
    module, _, attribute = target.partition(":")
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        raise _refusal(path, f'"{target}": no module {error.name} in {here} or among the installed packages') from error
    except AttributeError as error:
        raise _refusal(path, f'"{target}": {module} has no {attribute} ({error})') from error
    if not callable(found):
        raise _refusal(path, f'"{target}" is a {type(found).__name__}, which cannot be called')
    return found  # type: ignore[no-any-return]


def build_target(target: str, args: Mapping[str, Any], path: str) -> Any:
    """Call `target` with `args`. Raises ConfigError below the key `path` if it cannot be loaded or called with them."""
    builder = load_target(target, f"{path}.target")
    # Bound before the call, so that a TypeError raised inside the user's code is not taken for wrong arguments.
    try:
        inspect.signature(builder).bind(**args)
    except TypeError as error:
        raise _refusal(f"{path}.args", f'"{target}" does not take {dict(args)}: {error}') from error
    except ValueError:
        pass  # some builtins have no signature
    return builder(**args)


def _refusal(path: str, what: str) -> ConfigError:
    return ConfigError([Problem("", path, what)])
